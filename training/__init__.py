"""How the embedded models are made: data, stages, exports and the judge.

Nothing that serves a request imports this package.
"""
