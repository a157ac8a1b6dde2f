"""Tools of chats in OpenAI's shapes: functions that an answer may call, and the text in which models write calls.

Models are told of tools by their chat template, and write calls as text. `CALLS` has the formats that are read; which
of them a model writes is read off its template (`llm/tool_calls.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from contract.errors import Invalid
from contract.json_schema import FIELD as SCHEMA
from contract.json_schema import check_json_schema
from contract.strict import MAX_NAME, StrictModel, field_error

TOOLS, MESSAGES = "tools", "messages"
MAX_TOOLS = 128  # as in OpenAI's API
MAX_CALLS = 128  # of a message
MAX_TOOL_CHARACTERS = 262_144  # of all tools, as compact JSON
MAX_ARGUMENTS = 65_536  # characters of one call's in a message
MAX_DEPTH = 56  # of these
MAX_KEYWORDS = 1000  # of a function's parameters, at their top
NAME = r"^[A-Za-z0-9_-]{1,64}$"
HERMES, JSON, PLAIN, OTHER = "hermes", "json", "plain", "other"  # formats of calls


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a call is written: `begin`, an object of `name` and `arguments` (under this name), `end`.

    `tag` is what a call in the middle of a text begins with; without one a text that begins with an object is a call.
    """

    tag: str
    begin: str
    arguments: str
    end: str


CALLS = {
    HERMES: CallFormat("<tool_call>", "<tool_call>\n", "arguments", "\n</tool_call>"),
    JSON: CallFormat("", "", "parameters", ""),
    PLAIN: CallFormat("", "", "parameters", ""),
}
"""By format. Hermes's is also Qwen2.5's and Qwen3's, JSON Llama 3.1's; a model of the plain one has a template without
tools, and calls them only where the answer's grammar makes it.
"""


class Function(StrictModel):
    name: str = Field(pattern=NAME, max_length=64)
    description: str | None = Field(default=None, max_length=MAX_TOOL_CHARACTERS)
    parameters: dict[str, Any] | None = Field(
        default=None, max_length=MAX_KEYWORDS, description="a JSON schema of an object; default: one without properties"
    )
    strict: bool | None = Field(default=None, description="true: calls of it always fit its schema")


class Tool(StrictModel):
    """A function that the answer may call."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: str = Field(max_length=64)


class NamedTool(StrictModel):
    """The one tool that the answer calls."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(StrictModel):
    name: str = Field(max_length=MAX_NAME)
    arguments: str = Field(max_length=MAX_ARGUMENTS, description="a JSON object, as text")
    parsed_arguments: Any = Field(default=None, description="accepted and ignored")


class ToolCall(StrictModel):
    """A call of an earlier answer."""

    id: str = Field(max_length=MAX_NAME)
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = Field(default=None, description="accepted and ignored")
    extra_content: Any = Field(default=None, description="accepted and ignored")

    _arguments: dict[str, Any] = PrivateAttr()

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> ToolCall:
        arguments = _object(self.function.arguments.strip() or "{}")
        if arguments is None:
            raise field_error(
                "function", f"arguments must be a JSON object, at most {MAX_DEPTH} deep, of finite numbers"
            )
        self._arguments = arguments
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as an object, which chat templates read; none are {}."""
        return self._arguments

    def message(self) -> dict[str, Any]:
        """The call as templates read it."""
        function = {"name": self.function.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def tools_of(tools: list[Tool], name: str | None, *, constrained: bool) -> list[dict[str, Any]]:
    """The tools as a job has them: the one of this name, or all. Raises `Invalid` naming the bound that is exceeded.

    `constrained`: calls are held to all schemas, which must then be within the bounds of one.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise Invalid(TOOLS, "two functions have one name")
    if name is not None and name not in names:
        raise Invalid("tool_choice", "names no function of tools")
    chosen = [tool for tool in tools if name in (None, tool.function.name)]
    read = [tool.model_dump(exclude_none=True) for tool in chosen]
    if len(json.dumps(read, separators=(",", ":"))) > MAX_TOOL_CHARACTERS:
        raise Invalid(TOOLS, f"have more than {MAX_TOOL_CHARACTERS} characters")
    schemas = [tool.function.parameters or {} for tool in chosen]
    try:
        for schema in schemas:
            check_json_schema(schema)
            if schema.get("type", "object") != "object":
                raise Invalid(SCHEMA, "must be of an object")
        if constrained:
            check_json_schema({"anyOf": schemas})
    except Invalid as error:
        raise Invalid(TOOLS, f"the schema of parameters {error.message}") from None
    return read


def arguments_schema(tool: dict[str, Any], *, fitting: bool = True) -> dict[str, Any]:
    """The schema of a call's arguments: the function's, closed where it does not say that there are others; not
    `fitting`: any object.
    """
    schema = tool["function"].get("parameters") or {"properties": {}} if fitting else {}
    closed = fitting and schema.keys() <= _DESCRIPTIVE
    return {"type": "object", **({"additionalProperties": False} if closed else {}), **schema}


_DESCRIPTIVE = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema"}
"""Keywords beside which an object without `additionalProperties` is taken to have none."""


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a JSON value, names of members too."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value


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
