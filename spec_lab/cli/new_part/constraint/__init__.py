"""Files that ``spec-lab new constraint`` copies."""
