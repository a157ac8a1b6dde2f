"""Turns tokens into text."""
