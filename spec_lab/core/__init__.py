"""What everything else is built on: drafts, probabilities, keyed randomness, time, files."""
