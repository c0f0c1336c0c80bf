"""Files that ``spec-lab new metric`` copies."""
