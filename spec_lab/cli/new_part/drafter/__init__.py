"""Files that ``spec-lab new drafter`` copies."""
