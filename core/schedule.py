"""Which steps of a picture run the whole UNet (deep) and which only its last block (shallow): DeepCache's schedules.

Follows DeepCache (Ma et al., 2023, sections 3.3 and 4.1) and NVIDIA's MLPerf v4.0 submission, which runs even steps
deep and odd steps shallow. Knows numbers of steps; knows nothing of UNets and imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BLOCK, RESNET = "block", "resnet"
DEPTHS = (BLOCK, RESNET)
MAX_INTERVAL = 1_000


@dataclass(frozen=True, slots=True)
class DeepCache:
    """A schedule. The first step is always deep: a shallow one has nothing to go by before it.

    Every `interval`-th step is deep, counted from the last of the `first` protected ones, and so are the `last` steps;
    or exactly `deep_steps` are, counted from 0. A shallow step recomputes the UNet's last up block whole ("block") or
    no more than its last residual block ("resnet").
    """

    interval: int = 2
    depth: str = BLOCK
    first: int = 0
    last: int = 0
    deep_steps: tuple[int, ...] | None = None

    def complaint(self, steps: int) -> str | None:
        """What is wrong with it for a picture of so many steps, beginning with the field; None if nothing is."""
        if self.depth not in DEPTHS:
            return f"depth: must be one of {', '.join(DEPTHS)}"
        for field, value, low, high in (
            ("interval", self.interval, 1, MAX_INTERVAL),
            ("first", self.first, 0, MAX_INTERVAL),
            ("last", self.last, 0, MAX_INTERVAL),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                return f"{field}: must be a whole number between {low} and {high}"
        if self.deep_steps is None:
            return None
        if (self.interval, self.first, self.last) != (2, 0, 0):
            return "deep_steps: says which steps are deep, so interval, first and last must not be given beside it"
        return _complaint(self.deep_steps, steps)

    def plan(self, steps: int) -> tuple[bool, ...]:
        """For each of the steps, whether it is deep."""
        if self.deep_steps is not None:
            return tuple(step == 0 or step in self.deep_steps for step in range(steps))
        anchor = max(self.first, 1) - 1
        return tuple(
            step <= anchor or step >= steps - self.last or (step - anchor) % self.interval == 0 for step in range(steps)
        )


AUTO = DeepCache(interval=2, depth=RESNET, last=1)
"""What "auto" means. The submission's own schedule ends on a shallow step; one more deep step at the end keeps what
captions lose by that, and then the shorter depth costs nothing more (docs/results.md)."""


OFF, AUTOMATIC = "off", "auto"


def parse(text: str) -> DeepCache | None:
    """A schedule as people write it: "off", "auto", an interval ("3"), or one with a depth ("3:resnet").

    Raises ValueError, which says how it is written.
    """
    if text in (OFF, AUTOMATIC):
        return AUTO if text == AUTOMATIC else None
    interval, _, depth = text.partition(":")
    if re.fullmatch(r"[0-9]{1,4}", interval):
        schedule = DeepCache(int(interval), depth or BLOCK)
        if schedule.complaint(1) is None:
            return schedule
    raise ValueError(
        f"must be off, auto, or an interval from 1 to {MAX_INTERVAL} such as 3, and then perhaps a depth "
        f"({' or '.join(DEPTHS)}) such as 3:resnet"
    )


def read(value: object) -> DeepCache | None:
    """A schedule as jobs carry it: "off", "auto" or an object with a schedule's fields, null where not given.

    Raises ValueError, beginning with the field within it where there is one. What depends on the number of steps is
    left to `complaint`.
    """
    if value in (OFF, AUTOMATIC):
        return AUTO if value == AUTOMATIC else None
    if not isinstance(value, Mapping):
        raise ValueError('must be "off", "auto" or an object')
    given = {field: item for field, item in value.items() if item is not None}
    for field in given.keys() - {"interval", "depth", "first", "last", "deep_steps"}:
        raise ValueError(f"{field}: is not known")
    if "deep_steps" in given:
        if not isinstance(given["deep_steps"], (list, tuple)):
            raise ValueError("deep_steps: must be a list")
        given["deep_steps"] = tuple(given["deep_steps"])
    return DeepCache(**given)


def _complaint(deep_steps: Sequence[object], steps: int) -> str | None:
    for step in deep_steps:
        if isinstance(step, bool) or not isinstance(step, int):
            return "deep_steps: must be whole numbers"
        if not 0 <= step < steps:
            return f"deep_steps: must be between 0 and {steps - 1}, the last of {steps} steps"
    if len(set(deep_steps)) < len(deep_steps):
        return "deep_steps: names a step twice"
    return None
