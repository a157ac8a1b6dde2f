"""The model families: their networks, their layers' recipes, and tiny models of each for tests."""
