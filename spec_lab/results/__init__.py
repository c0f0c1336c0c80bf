"""Results of a run: tables, manifest, sweep folders."""
