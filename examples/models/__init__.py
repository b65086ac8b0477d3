"""Language Hugging Face models, with their weights."""
