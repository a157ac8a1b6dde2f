"""Trains the embedded language models, and composes scenes for judges: data, stages, exports and evaluation.

Nothing that serves a request imports this package.
"""
