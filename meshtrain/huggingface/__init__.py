"""Hugging Face weight folders: starting from them, and writing them."""
