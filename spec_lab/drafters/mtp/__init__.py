"""Multi-token prediction modules."""
