"""Kangaroo: an adapter below an early exit."""
