"""Decoding: requests and their sequences, the KV cache, the model runner, the step and its commit."""
