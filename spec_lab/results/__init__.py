"""What a run leaves behind: tables, manifest, sweep folders."""
