"""Language models of Hugging Face, with their weights."""
