"""Bounds shared by image and text requests, and checks of single values."""

from __future__ import annotations

import math

from contract.characters import text_error
from contract.errors import Invalid

MAX_SEED = 2**63 - 1
MAX_EXACT = 2**53 - 1  # the largest whole number up to which JSON's peers, such as JavaScript, hold every one
MAX_DEADLINE_S = 86_400
# Kinds of values, in the locations of errors; no names of fields.
WORD, OBJECT, LIST, FLAG, NOTHING = "(word)", "(object)", "(list)", "(flag)", "(nothing)"
PRIORITY = 5  # default of a request; 0 is the most urgent, 9 the least


def next_seed(seed: int, k: int) -> int:
    """The seed of the k-th of several, counted from 0; the largest seed is followed by 0."""
    return (seed + k) % (MAX_SEED + 1)


def check_whole(field: str, value: object, low: int, high: int) -> None:
    """Raise `Invalid` for a value that is not an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(field, "must be a whole number")
    if not low <= value <= high:
        raise Invalid(field, range_error(low, high, value))


def check_number(field: str, value: object, low: float, high: float) -> float:
    """Return the value. Raises `Invalid` if it is not a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Invalid(field, "must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise Invalid(field, "must be a finite number")
    if not low <= value <= high:
        raise Invalid(field, range_error(low, high, value))
    return value


def range_error(low: float, high: float, value: float) -> str:
    """The message for a number outside its range."""
    low_text, high_text = (str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (low, high))
    return f"must be between {low_text} and {high_text}, not {short(value)}"


def check_flag(field: str, value: object) -> None:
    """Raise `Invalid` for a value that is not a boolean."""
    if not isinstance(value, bool):
        raise Invalid(field, "must be true or false")


def check_text(field: str, value: object, max_characters: int) -> str:
    """Return the text. Raises `Invalid` if it is not one, is too long, or contains control characters."""
    if not isinstance(value, str):
        raise Invalid(field, "must be text")
    wrong = text_error(value, max_characters)
    if wrong is not None:
        raise Invalid(field, wrong)
    return value


def short(value: float) -> str:
    """Abbreviate a value for a message: an integer may have a million digits."""
    return f"{value:g}" if isinstance(value, float) else str(value) if abs(value) < 10**20 else "that"
