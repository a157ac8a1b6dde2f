"""How a text model is spread over the GPUs of a host: `tp2`, `pp4`, `tp2pp2`."""

from __future__ import annotations

import re
from typing import NamedTuple

TENSOR = (1, 2, 4, 8)
PIPELINE = range(1, 17)
_PATTERN = re.compile(r"(?:tp([0-9]{1,2}))?(?:pp([0-9]{1,2}))?")


class Parallel(NamedTuple):
    """Each layer is split over `tensor` GPUs, and the layers are divided among `pipeline` stages of so many GPUs."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """The number of processes, one a GPU."""
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        parts = [f"{name}{size}" for name, size in (("tp", self.tensor), ("pp", self.pipeline)) if size > 1]
        return "".join(parts) or "off"


ALONE = Parallel()


def parse(text: str) -> Parallel:
    """Parse the setting; "" is one GPU. Raises ValueError."""
    match = _PATTERN.fullmatch(text)
    if match is not None:
        parallel = Parallel(*(int(size or 1) for size in match.groups()))
        if parallel.tensor in TENSOR and parallel.pipeline in PIPELINE:
            return parallel
    raise ValueError(
        f"must be such as tp2, pp4 or tp2pp2, with {', '.join(map(str, TENSOR[1:]))} for tp and 2 to {PIPELINE[-1]} "
        f"for pp, not {text[:40]!r}"
    )
