"""Decoding: sequences, the step and its commit, the engine, and what a proposer is."""
