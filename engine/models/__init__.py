"""Model families by Hugging Face architecture name; `registry` finds them."""
