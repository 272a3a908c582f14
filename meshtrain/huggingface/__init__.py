"""Hugging Face's folders of weights: to start from them, and to write them."""
