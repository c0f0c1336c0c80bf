"""Bundled models, tokenizer and held-out prompts."""
