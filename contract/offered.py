"""Checks names of files that a request uses, such as upscalers and control networks, against those offered."""

from __future__ import annotations

from collections.abc import Collection

from contract.errors import Invalid
from contract.loras import name_error, normal


def check_offered(field: str, name: object, offered: Collection[str] | None, *, listed: bool = True) -> None:
    """Raise `Invalid` for what is no name, and for one that is not offered; None: only the syntax is checked.

    `listed`: the error lists those offered, and does not refer to /v1/models.
    """
    if not isinstance(name, str) or name_error(name):
        raise Invalid(field, f"must be a name, and {name_error(name)}" if isinstance(name, str) else "must be a name")
    if offered is None or normal(name) in offered:
        return
    alternatives = f"it has {', '.join(sorted(offered))}" if listed else "GET /v1/models lists those there are"
    reason = f"there is no {name}; {alternatives}" if offered else "it has none"
    raise Invalid(field, f"is not offered by this model: {reason}")
