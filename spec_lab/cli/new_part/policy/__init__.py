"""Files that ``spec-lab new policy`` copies."""
