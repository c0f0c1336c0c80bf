"""Heads that draft all levels of an EAGLE-3 network by one forward."""
