"""Tools of chats in OpenAI's shapes: functions that an answer may call, and the text in which models write calls.

Models are told of tools by their chat template, and write calls as text. `CALLS` has the formats that are read; which
of them a model writes is read off its template (`llm/grammars/tool_calls.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from contract.errors import Invalid
from contract.json_schema import FIELD as SCHEMA
from contract.json_schema import MAX_KEYWORDS, check_json_schema
from contract.strict import StrictModel

TOOLS, MESSAGES = "tools", "messages"
MAX_TOOLS = 128  # as in OpenAI's API
MAX_TOOL_CHARACTERS = 262_144  # of all tools, as compact JSON
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


def tool_values(
    functions: Sequence[Function], choice: str | FunctionName | None, parallel: bool | None
) -> dict[str, Any]:
    """The fields of a job whose answers may call these functions, by a request's `tool_choice`: a word, or the one that
    it must call. Raises `Invalid` naming the bound that is exceeded.
    """
    name = choice.name if isinstance(choice, FunctionName) else None
    required = name is not None or choice == "required"
    if required and not functions:
        raise Invalid("tool_choice", "needs tools")
    if not functions or choice == "none":
        return {}
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise Invalid(TOOLS, "two functions have one name")
    if name is not None and name not in names:
        raise Invalid("tool_choice", "names no function of tools")
    chosen = [function for function in functions if name in (None, function.name)]
    tools = [
        {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"type"})}
        for function in chosen
    ]
    if len(json.dumps(tools, separators=(",", ":"))) > MAX_TOOL_CHARACTERS:
        raise Invalid(TOOLS, f"have more than {MAX_TOOL_CHARACTERS} characters")
    schemas = [function.parameters or {} for function in chosen]
    try:
        for schema in schemas:
            check_json_schema(schema)
            if schema.get("type", "object") != "object":
                raise Invalid(SCHEMA, "must be of an object")
        if required or any(function.strict for function in functions):  # held to all of them: within the bounds of one
            check_json_schema({"anyOf": schemas})
    except Invalid as error:
        raise Invalid(TOOLS, f"the schema of parameters {error.message}") from None
    parallel = parallel if name is None else False
    return {"tools": tools, "tools_required": required or None, "parallel_tool_calls": parallel}


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
