"""Reads PEFT's LoraConfig as PEFT does: values and choices of layers by regular expressions of their names, within
bounds, since they come from files of strangers.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import regex  # like `re`, with a limit of time; transformers requires it too

_MOST_CHARACTERS = 1000  # of an expression
_MOST_EXPRESSIONS = 500
_BUDGET_S = 5.0  # of all layers of a file
_ALL_LINEAR = "all-linear"
_PLAIN = re.compile(r"(\^?)([\w.]+)\$?")
_Shape = tuple[bool, int, tuple[int, ...]]  # whether a plain key is a whole name, its length, and where its dots are
# Fields that say of an adapter more than what is read, and the values that say nothing; None always does.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "lora_bias": (False,), "fan_in_fan_out": (False,),
    "modules_to_save": ([],), "trainable_token_indices": ([], {}), "layer_replication": ([],), "use_qalora": (False,),
    "target_parameters": ([],), "alora_invocation_tokens": ([],), "init_lora_weights": (True, False, "gaussian", "eva"),
    "use_bdlora": (False,), "arrow_config": ({},), "kasa_config": ({},), "monteclora_config": ({},),
}  # fmt: skip


def check_fields(config: Mapping[str, Any], source: str, read: Collection[str] = ()) -> None:
    """Raise ValueError, naming the field, for a value that says more of an adapter than its matrices do. `source` is
    where the config is from, `read` are fields that the caller reads.
    """
    for field, values in _NEUTRAL.items():
        value = config.get(field)
        if field not in read and value is not None and value not in values:
            raise ValueError(f"{source}: {field} {repr(value)[:60]} is not supported")


class _Deadline:
    """A limit of time for all expressions of one field. It begins with the first name."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._until: float | None = None

    def left_s(self) -> float:
        """Return the seconds that are left. Raises ValueError, naming the field, if there are none."""
        now = time.monotonic()
        self._until = self._until or now + _BUDGET_S
        if now >= self._until:
            raise self.error()
        return self._until - now

    def error(self) -> ValueError:
        return ValueError(f"{self._field}: its expressions take more than {_BUDGET_S:g} s to match")

    def fits(self, expression: Any, name: str, *, whole: bool = False) -> bool:
        """Return whether the expression fits from the name's beginning, or the `whole` of it."""
        try:
            match = expression.fullmatch if whole else expression.match
            return match(name, timeout=self.left_s()) is not None
        except TimeoutError:
            raise self.error() from None


def _compiled(field: str, key: object, pattern: str) -> Any:
    """Return the compiled pattern, which the file has as `key`. Raises ValueError, naming the field."""
    if not isinstance(key, str) or len(key) > _MOST_CHARACTERS:
        raise ValueError(f"{field} has an expression that is no text of at most {_MOST_CHARACTERS} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)  # what `re` does not take, PEFT does not either
            return regex.compile(pattern, regex.VERSION0)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{field}: {key[:60]!a} is no regular expression ({error})") from error


class LayerPatterns:
    """A field such as `alpha_pattern`. The first key that fits the end of a layer's name, from its beginning or a dot
    on, counts (`peft.utils.other.get_pattern_key`).
    """

    def __init__(self, field: str, patterns: object) -> None:
        """Raises ValueError, naming the field, for what is no object, no expression, or beyond the bounds."""
        self._deadline = _Deadline(field)
        # Place and value by the key without its dots, which fit any character.
        self._plain: dict[_Shape, dict[str, tuple[int, Any]]] = {}
        self._expressions: list[tuple[int, Any, Any]] = []  # place, expression, value
        if patterns is not None and not isinstance(patterns, Mapping):
            raise ValueError(f"{field} is no object")
        for place, (key, value) in enumerate((patterns or {}).items()):
            if (plain := _PLAIN.fullmatch(key)) is not None:
                name = plain[2]
                shape = bool(plain[1]), len(name), tuple(at for at, mark in enumerate(name) if mark == ".")
                self._plain.setdefault(shape, {}).setdefault(name.replace(".", ""), (place, value))
            elif len(self._expressions) == _MOST_EXPRESSIONS:
                raise ValueError(f"{field} has more than {_MOST_EXPRESSIONS} expressions")
            else:
                self._expressions.append((place, _compiled(field, key, rf"(.*\.)?({key})$"), value))

    def value(self, layer: str, default: Any) -> Any:
        """Return the value for this layer. Raises ValueError where the expressions take too long."""
        plain = min(self._plain_matches(layer), key=lambda match: match[0], default=None)
        for place, expression, value in self._expressions:
            if plain is not None and place > plain[0]:
                break
            if self._deadline.fits(expression, layer):
                return value
        return default if plain is None else plain[1]

    def _plain_matches(self, layer: str) -> Iterator[tuple[int, Any]]:
        """Yield place and value of the first plain key of each shape that fits an end of the name."""
        ends = {len(layer): layer}
        ends |= {len(layer) - at - 1: layer[at + 1 :] for at, mark in enumerate(layer) if mark == "."}
        for (whole, length, dots), keys in self._plain.items():
            if length in ends and (not whole or length == len(layer)):
                self._deadline.left_s()
                marks = [*ends[length]]
                for at in reversed(dots):
                    del marks[at]
                if (match := keys.get("".join(marks))) is not None:
                    yield match


class Targets:
    """The layers that an adapter is for (`peft.tuners.tuners_utils.check_target_module_exists`)."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        """Raises ValueError, naming the field."""
        self._source = source
        self._fields = {
            name: None if config.get(name) in (None, [], "") else _Names(f"{source}: {name}", config[name])
            for name in ("target_modules", "exclude_modules")
        }
        indices, patterns = (config.get(name) for name in ("layers_to_transform", "layers_pattern"))
        self._indices = [indices] if isinstance(indices, int) else indices or []
        if not isinstance(self._indices, list) or not all(isinstance(index, int) for index in self._indices):
            raise ValueError(f"{source}: layers_to_transform is no list of numbers")
        self._deadline = _Deadline(f"{source}: layers_pattern")
        keys = [patterns] if isinstance(patterns, str) and patterns else patterns or []
        forms = [rf"(?:^|.*?\.){key}\.(?P<idx>\d+)\." for key in keys] or [r".*?\.[^.]*\.(?P<idx>\d+)\."]
        self._numbered = [
            _compiled(f"{source}: layers_pattern", form, form)
            for form in forms[: _MOST_EXPRESSIONS if self._indices else 0]
        ]

    def check(self, layer: str) -> None:
        """Raise ValueError, naming the field, for a layer that the config leaves out."""
        targets, excluded = (self._fields[name] for name in ("target_modules", "exclude_modules"))
        if targets is not None and not targets.has(layer):
            raise self._left_out(layer, "target_modules")
        if excluded is not None and excluded.has(layer):
            raise self._left_out(layer, "exclude_modules")
        whole = targets is not None and layer in targets.names  # such a layer is in whatever its number
        if self._indices and not whole and self._index(layer) not in self._indices:
            raise self._left_out(layer, "layers_to_transform")

    def _index(self, layer: str) -> int | None:
        for expression in self._numbered:
            try:
                match = expression.match(layer, timeout=self._deadline.left_s())
            except TimeoutError:
                raise self._deadline.error() from None
            if match is not None:
                return int(match["idx"])
        return None

    def _left_out(self, layer: str, field: str) -> ValueError:
        return ValueError(f"{self._source}: {field} leaves out {layer[:120]!a}, which its tensors change")


class _Names:
    """A list of names or ends of names, or an expression of whole names."""

    def __init__(self, field: str, value: object) -> None:
        self._deadline = _Deadline(field)
        self._expression = None
        self._all = value == _ALL_LINEAR
        self.names: frozenset[str] = frozenset()
        if isinstance(value, str):
            self._expression = None if self._all else _compiled(field, value, value)
        elif isinstance(value, list) and all(isinstance(name, str) for name in value):
            self.names = frozenset(value)
        else:
            raise ValueError(f"{field} is no expression and no list of names")

    def has(self, layer: str) -> bool:
        if self._expression is not None:
            return self._deadline.fits(self._expression, layer, whole=True)
        ends = (layer[at + 1 :] for at, mark in enumerate(layer) if mark == ".")
        return self._all or layer in self.names or any(end in self.names for end in ends)
