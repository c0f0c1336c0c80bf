"""Drafters that fill a block of masked positions at once."""
