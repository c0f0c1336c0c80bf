"""The target with some of its layers skipped."""
