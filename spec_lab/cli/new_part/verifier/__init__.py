"""Files that ``spec-lab new verifier`` copies."""
