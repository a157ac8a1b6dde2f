"""Benchmarks, each of which prints a table for people and a JSON object last."""
