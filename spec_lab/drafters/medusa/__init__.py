"""Medusa heads."""
