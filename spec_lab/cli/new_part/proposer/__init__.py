"""Files that ``spec-lab new proposer`` copies."""
