"""Hydra heads."""
