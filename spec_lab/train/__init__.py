"""Training of draft models and Medusa heads on a target's own text and distributions."""
