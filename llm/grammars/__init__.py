"""Constrains answers to JSON schemas, grammars and calls of tools."""
