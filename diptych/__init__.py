"""The name that Diptych is installed under: a wheel holds every room below it, as `diptych.core` or `diptych.api`.

In a checkout the rooms lie beside this folder, under their own names. `deployment/wheel.py` puts them here.
"""

__version__ = "0.2.0"
