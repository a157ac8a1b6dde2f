"""A hook for whoever serves strangers: somebody else's callable looks at finished pictures and may refuse them.

None is built in, and none is asked unless a setting names it. Knows how it is found and asked; knows nothing of what it
looks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.folder import ModelError, first_line

if TYPE_CHECKING:
    from pipeline.picture import Picture

Checker: TypeAlias = Callable[[Any], object]
"""Gets a picture (PIL, RGB) and says whether it is fine. Called on several threads at once."""


class Filtered(Exception):
    """A picture was refused."""


def load(name: str) -> Checker | None:
    """What `module:callable` names; None for nothing. Raises `ModelError`."""
    if not name:
        return None
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever that module does when it is imported
        raise ModelError(f"checker {name}: is not there ({type(error).__name__}: {first_line(error)})") from error
    if not callable(found):
        raise ModelError(f"checker {name}: cannot be called")
    return found  # type: ignore[no-any-return]


def check(checker: Checker | None, pictures: Sequence[Picture]) -> None:
    """Raise `Filtered` where one of them is refused, and what the checker itself raises: then nothing is shown."""
    if checker is not None and not all(checker(picture.image.copy()) for picture in pictures):
        raise Filtered
