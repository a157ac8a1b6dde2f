"""What every benchmark shares: models, load, timing, services, provenance, tables and result files."""
