"""Loading of models and their files; tensor parallelism."""
