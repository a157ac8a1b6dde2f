"""Hides from the processes that tests start what only tests need of the environment and users do not have.

diffusers and transformers import peft and scipy wherever they find them, which takes more CPU than torch does.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import Distribution, DistributionFinder

HIDDEN = ("peft", "scipy")


class Finder(PathFinder):
    """Finds what the path holds, less `HIDDEN`."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: "list[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        return None if path is None and fullname in HIDDEN else super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *context: "DistributionFinder.Context") -> "Iterable[Distribution]":
        """torchmetrics asks for what is installed, and imports it then."""
        return () if context and context[0].name in HIDDEN else super().find_distributions(*context)


sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
