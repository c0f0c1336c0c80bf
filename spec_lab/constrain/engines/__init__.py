"""Grammar engines: what compiles a pattern, schema or grammar into states and masks."""
