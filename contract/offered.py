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


def check_offered(field: str, name: object, offered: Collection[str] | None, reason: str | None = None) -> None:
    """Raise `Invalid` for what is no name, and for one that is not offered; None: only the syntax is checked.

    `reason` is why the model takes none of the kind; "": it takes some, and has none; None: not announced.
    """
    if not isinstance(name, str) or name_error(name):
        raise Invalid(field, f"must be a name, and {name_error(name)}" if isinstance(name, str) else "must be a name")
    if offered is None or normal(name) in offered:
        return
    if reason and not offered:
        raise Invalid(field, reason)
    listed = list_offered(offered) if offered else "its worker's folder of them is empty"
    known = f"there is no {name}; {listed}" if offered or reason is not None else "it has none"
    raise Invalid(field, f"is not offered by this model: {known}")
