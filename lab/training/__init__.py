"""Trains the embedded models: data, stages, exports and evaluation.

Nothing that serves a request imports this package.
"""
