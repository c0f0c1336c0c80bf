"""Certification: is a pair of proposer and verifier lossless? Exactly on toys, statistically on real models."""
