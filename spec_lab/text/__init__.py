"""Text: prompts, and the detokenizer with its stop strings."""
