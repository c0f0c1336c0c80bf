"""Training of the bundled models: corpus, tokenizer, target, self-distilled draft and Medusa heads, prompts, card."""
