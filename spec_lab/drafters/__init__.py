"""Drafters with networks of their own: one folder a family (network, published files, proposer, training)."""
