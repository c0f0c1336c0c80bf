"""The command line, the only part that knows Hydra."""
