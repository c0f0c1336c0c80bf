"""The basis of everything else: drafts, probabilities, keyed randomness, time, files."""
