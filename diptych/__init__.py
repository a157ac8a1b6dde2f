"""The installed package: a wheel contains all packages of the repository below it, such as `diptych.core`.

In a checkout these are at the top level of the repository. `deployment/wheel.py` moves them here.
"""

__version__ = "0.3.0"
