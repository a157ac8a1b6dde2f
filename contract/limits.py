"""Reads limits of API keys: `600/minute, emoji-z=10/minute` limits all requests, and those of one model besides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from contract.characters import text_error
from contract.strict import MAX_NAME

ALL = ""  # stands for all models in a mapping of limits


class LimitForm(NamedTuple):
    """The form of a limit, an example of it, and what else it may be."""

    pattern: re.Pattern[str]
    example: str
    words: str = ""


RATE = LimitForm(re.compile(r"[1-9][0-9]{0,8}/(second|minute|hour|day)"), "60/minute", " (second, minute, hour or day)")
COUNT = LimitForm(re.compile(r"[1-9][0-9]{0,6}"), "20")
SHARE = LimitForm(re.compile(r"[1-9][0-9]{0,6}|([1-9][0-9]?|100)%"), "20", ", or a share such as 25%")

KEY_LIMITS = {"rate": RATE, "quota": RATE, "tokens": RATE, "jobs": COUNT, "running": SHARE}
"""The limits that a key may have by model: requests, images and tokens per time, live jobs, and those at workers."""


@lru_cache(maxsize=4096)
def read_limits(text: str, form: LimitForm) -> Mapping[str, str]:
    """Parse `limit, model=limit, …` to the limit of each model; of all of them together under "".

    Raises ValueError, naming the entry that is wrong.
    """
    limits: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        model, separator, limit = (part.strip() for part in entry.rpartition("="))
        if form.pattern.fullmatch(limit) is None:
            raise ValueError(f"{entry!r} must look like {form.example}{form.words}, of a model emoji-z={form.example}")
        if separator and (not model or text_error(model, MAX_NAME) is not None):
            raise ValueError(f"{entry!r} must name a model in at most {MAX_NAME} printable characters")
        if model in limits:
            raise ValueError(f"{entry!r} is a second limit of {model or 'all models'}")
        limits[model] = limit
    return MappingProxyType(limits)
