"""A Hugging Face inference engine that is built to be looked into."""
