"""Says how an optional dependency is installed, in a checkout and in an installed package."""

from __future__ import annotations


def pip_install(extra: str, module: str = __name__) -> str:
    """The command that brings an extra of pyproject.toml; in a wheel all modules lie below `diptych`."""
    return f"pip install '{'diptych' if module.startswith('diptych.') else '.'}[{extra}]'"
