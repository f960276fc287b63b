"""Model families, named after their Hugging Face architectures; `registry` maps architecture names to classes."""
