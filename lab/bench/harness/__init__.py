"""The harness of every benchmark: models, load, timing, services, provenance, tables and result files."""
