"""Checks names of files that a request uses, such as upscalers and control networks, against those offered."""

from __future__ import annotations

from collections.abc import Collection

from contract.errors import Invalid
from contract.loras import name_error, normal

_MOST_LISTED = 10  # names in an error


def list_offered(names: Collection[str]) -> str:
    """Return the names that are offered in words, the first of them if there are many."""
    listed = sorted(names)
    more = f" and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
    return f"it has {', '.join(listed[:_MOST_LISTED])}{more}"


def check_offered(field: str, name: object, offered: Collection[str] | None) -> None:
    """Raise `Invalid` for what is no name, and for one that is not offered; None: only the syntax is checked."""
    if not isinstance(name, str) or name_error(name):
        raise Invalid(field, f"must be a name, and {name_error(name)}" if isinstance(name, str) else "must be a name")
    if offered is None or normal(name) in offered:
        return
    reason = f"there is no {name}; {list_offered(offered)}" if offered else "it has none"
    raise Invalid(field, f"is not offered by this model: {reason}")
