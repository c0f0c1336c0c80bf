"""The command line: the only package that imports Hydra."""
