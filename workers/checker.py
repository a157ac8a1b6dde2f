"""Optional content filter: a callable from the settings checks finished images and may reject them.

None is built in, and without the setting none is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.checkpoints.folder import ModelError, first_line

if TYPE_CHECKING:
    from pipeline.pixels.picture import Picture

Checker: TypeAlias = Callable[[Any], object]
"""Gets a picture (PIL, RGB) and says whether it is fine. Called on several threads at once."""


class UnsafeImage(Exception):
    """An image was rejected."""


def load(name: str) -> Checker | None:
    """Import what `module:callable` names; None for an empty name. Raises `ModelError`."""
    if not name:
        return None
    module, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except Exception as error:  # anything that module raises on import
        raise ModelError(f"checker {name}: cannot be imported ({type(error).__name__}: {first_line(error)})") from error
    if not callable(value):
        raise ModelError(f"checker {name}: cannot be called")
    return value  # type: ignore[no-any-return]


def check(checker: Checker | None, pictures: Sequence[Picture]) -> None:
    """Raise `UnsafeImage` if an image is rejected.

    Errors of the checker itself are raised too: then no image is shown.
    """
    if checker is not None and not all(checker(picture.image.copy()) for picture in pictures):
        raise UnsafeImage
