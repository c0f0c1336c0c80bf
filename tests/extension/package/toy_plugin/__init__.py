"""Parts for spec_lab from another package: one file and one YAML each, without registration."""
