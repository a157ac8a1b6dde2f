"""The messages of a conversation: their parts and calls in OpenAI's two shapes, and the one form that a job has.

`contract/chat.py` reads the shape of chats, `contract/responses.py` that of responses; both add to a `Conversation`.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, Tag, model_validator

from contract.bounds import WORD
from contract.errors import UNSUPPORTED
from contract.strict import MAX_NAME, IgnoredValue, StrictModel, field_error

MAX_MESSAGES = 1000
MAX_PARTS = 1000  # of a message
MAX_CALLS = 128  # of a message
MAX_CHARACTERS = 1_000_000  # of a whole job; the model's context is counted in tokens
MAX_ARGUMENTS = 65_536  # characters of one call's in a message
MAX_DEPTH = 56  # of these


Words = Annotated[str, Field(max_length=MAX_CHARACTERS), Tag(WORD)]


def _reads_text(kind: Any) -> Any:
    name = next((name for word, name in _OTHERS.items() if isinstance(kind, str) and word in kind), None)
    if name is not None:
        raise field_error("", f"{name} are not read: the models here read text alone", UNSUPPORTED)
    return kind


_OTHERS = {"image": "pictures", "audio": "sounds", "video": "videos", "file": "files"}
READS_TEXT = BeforeValidator(_reads_text)
"""Refuses the type of a part that is no text by what it is."""


class Part(StrictModel):
    """A part of a content; each shape has its names of `type`."""

    text: Words | None = None
    refusal: Words | None = Field(default=None, description="of the type refusal")
    annotations: IgnoredValue = None

    @model_validator(mode="after")
    def _has_text(self) -> Part:
        name = "refusal" if self.given.get("type") == "refusal" else "text"
        if getattr(self, name) is None:
            raise field_error(name, "must be given", "missing_required_parameter")
        return self


def text_of(content: str | list[Any]) -> str:
    """The text of a content: one, or `Part`s."""
    return content if isinstance(content, str) else "".join(part.text or part.refusal or "" for part in content)


class Called(StrictModel):
    """A function that an earlier answer called."""

    name: str = Field(max_length=MAX_NAME)
    arguments: Annotated[
        str,
        BeforeValidator(lambda value: json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value),
        Field(max_length=MAX_ARGUMENTS, description="a JSON object, as text, or as it is"),
    ]

    _value: dict[str, Any] = PrivateAttr()

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Called:
        value = _object(self.arguments.strip() or "{}")
        if value is None:
            raise field_error("", f"arguments must be a JSON object, at most {MAX_DEPTH} deep, of finite numbers")
        self._value = value
        return self

    def function(self) -> dict[str, Any]:
        """The function with its arguments as an object, which chat templates read; none are {}."""
        return {"name": self.name, "arguments": self._value}


class Conversation:
    """Messages as chat templates read them: a tool's result has the name of the function that was called."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of called functions, by the call's id

    def add(self, role: str, text: str, call_id: str | None = None, name: str | None = None) -> None:
        """Add a message: of a tool, the result of the call of this id, of a function of this name where it is known."""
        message = {"role": "system" if role == "developer" else role, "content": text}
        if call_id is not None:
            known = name or self._names.get(call_id)
            message |= {"tool_call_id": call_id, **({"name": known} if known else {})}
        self.messages.append(message)

    def add_call(self, id: str, called: Called) -> None:
        """Add a call to the assistant's message at the end, or to a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", "")
        self.messages[-1].setdefault("tool_calls", []).append(
            {"id": id, "type": "function", "function": called.function()}
        )
        self._names[id] = called.name


def _object(text: str) -> dict[str, Any] | None:
    """The object of a JSON text; None: it is none, or nested more than `MAX_DEPTH` deep."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _depth(value) <= MAX_DEPTH else None


def _finite(text: str) -> float:
    """A number of JSON. Raises ValueError for NaN and infinities, which no record holds."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        depth += 1
        level = [item for inner in level for item in (inner.values() if isinstance(inner, dict) else inner)]
    return depth
