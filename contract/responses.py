"""OpenAI's Responses API, without state: a body that is translated to a chat's, and means the same job.

An `input` brings its whole conversation: nothing is stored that a later request could refer to.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from contract.bounds import LIST, MAX_DEADLINE_S, MAX_SEED, NOTHING, OBJECT, WORD
from contract.errors import INVALID_VALUE, UNSUPPORTED, Invalid
from contract.strict import FIELD, MAX_IGNORED, MAX_NAME, StrictModel, field_error
from contract.text import (
    MAX_CHARACTERS,
    MAX_KEYWORDS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPERATURE,
    ChatFields,
    Metadata,
    TextJob,
)
from contract.tools import MAX_ARGUMENTS, MAX_CALLS, MAX_TOOLS, Function

_STATELESS = "no response is stored here: send the whole conversation as input, with store: false where a client has it"
_NONE = "does not make a conversation"
_CONVERSATIONS = {  # by pydantic's type of error
    "too_short": "has no message",
    "too_long": f"has more than {MAX_MESSAGES} messages with the instructions, or {MAX_CALLS} calls after one another",
}
_IGNORED = "accepted and ignored"
_Ignored = Annotated[Any, Field(description=_IGNORED)]
_IgnoredText = Annotated[str | None, Field(max_length=MAX_IGNORED, description=_IGNORED)]
ITEMS = ("(message)", "(function_call)", "(function_call_output)", "(reasoning)", "(item_reference)")  # tags, as WORD
_MESSAGE, _CALL, _OUTPUT, _REASONING, _REFERENCE = ITEMS
_FIELDS = {"messages": "input", "max_tokens": "max_output_tokens", "json_schema": "text.format"}  # of a chat


def _kind(value: Any) -> str:
    return WORD if isinstance(value, str) else NOTHING if value is None else LIST if isinstance(value, list) else OBJECT


def _type(value: Any) -> str:
    """The tag of an item by its type, which a message need not say."""
    kind = value.get("type") if isinstance(value, dict) else None
    return _MESSAGE if kind is None else f"({kind})" if isinstance(kind, str) else OBJECT


class InputPart(StrictModel):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = Field(default=None, max_length=MAX_CHARACTERS)
    refusal: str | None = Field(default=None, max_length=MAX_CHARACTERS)
    annotations: _Ignored = None
    logprobs: _Ignored = None

    @model_validator(mode="after")
    def _has_text(self) -> InputPart:
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise field_error("text", "must be given", "missing_required_parameter")
        return self


_Text = Annotated[
    Annotated[str, Field(max_length=MAX_CHARACTERS), Tag(WORD)]
    | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag(LIST)],
    Discriminator(_kind),
]


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal or "" for part in content)


class _Item(StrictModel):
    """What is null in it is left out, whatever its name: a client writes down fields that no answer here has."""

    id: _IgnoredText = None
    status: _IgnoredText = None

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class InputMessage(_Item):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text
    phase: _IgnoredText = None


class FunctionCallItem(_Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_NAME)
    name: str = Field(max_length=MAX_NAME)
    arguments: str = Field(max_length=MAX_ARGUMENTS, description="a JSON object, as text")


class FunctionOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=MAX_NAME)
    output: _Text


class ReasoningItem(_Item):
    """Accepted and ignored."""

    type: Literal["reasoning"]
    summary: _Ignored = None
    content: _Ignored = None
    encrypted_content: _Ignored = None


class ItemReference(_Item):
    """Not offered."""

    type: Literal["item_reference"]

    @model_validator(mode="after")
    def _refused(self) -> ItemReference:
        raise field_error("type", _STATELESS, UNSUPPORTED)


Item = Annotated[
    Annotated[InputMessage, Tag(_MESSAGE)]
    | Annotated[FunctionCallItem, Tag(_CALL)]
    | Annotated[FunctionOutputItem, Tag(_OUTPUT)]
    | Annotated[ReasoningItem, Tag(_REASONING)]
    | Annotated[ItemReference, Tag(_REFERENCE)],
    Discriminator(_type),
]


class FunctionTool(Function):
    """A function that the answer may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type", "function") != "function":
            raise field_error("type", "must be function: OpenAI's own tools are not offered", UNSUPPORTED)
        return value


class FunctionChoice(StrictModel):
    """The one function that the answer calls."""

    type: Literal["function"]
    name: str = Field(max_length=64)


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: _IgnoredText = None
    strict: bool | None = Field(default=None, description="accepted and ignored: answers always fit the schema")
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema", max_length=MAX_KEYWORDS)

    @model_validator(mode="after")
    def _has_a_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise field_error("schema", "must be given where the type is json_schema, and only there")
        return self


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: _IgnoredText = None


_EXAMPLES: Any = [
    {"input": "a cat", "instructions": "Be brief.", "max_output_tokens": 20, "store": False},
    {
        "input": [
            {"role": "user", "content": "Is it warm?"},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "weather",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            }
        ],
    },
]


class ResponseFields(StrictModel):
    """`POST /v1/responses`."""

    model_config = ConfigDict(title="ResponseRequest", json_schema_extra={"examples": _EXAMPLES})

    model: str | None = Field(
        default=None, max_length=MAX_NAME, description="a name from /v1/models; default: the first that is live there"
    )
    input: Annotated[
        Annotated[str, Field(max_length=MAX_CHARACTERS), Tag(WORD)]
        | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag(LIST)],
        Discriminator(_kind),
    ] = Field(description="a text, or the whole conversation: messages, calls of functions and their results")
    instructions: str | None = Field(default=None, max_length=MAX_CHARACTERS, description="a message of the system")
    max_output_tokens: int | None = Field(default=None, ge=1, description="of the answer, at most")
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag(WORD)]
        | Annotated[FunctionChoice, Tag(OBJECT)]
        | Annotated[None, Tag(NOTHING)],
        Discriminator(_kind),
    ] = Field(default=None, description="whether it calls any; required: one at least; or the one that it calls")
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call")
    stream: bool | None = Field(default=None, description="true: server-sent events")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="equal seeds give equal answers")
    priority: int | None = Field(default=None, ge=0, le=9, description="0 is the most urgent, 5 the default")
    deadline_s: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False)
    previous_response_id: str | None = Field(default=None, max_length=MAX_IGNORED, description="not offered")
    conversation: Any = Field(default=None, description="not offered")
    prompt: Any = Field(default=None, description="not offered")
    background: bool | None = Field(default=None, description="not offered: only false is accepted")
    top_logprobs: int | None = Field(default=None, ge=0, le=0, description="not offered: only 0 is accepted")
    store: bool | None = Field(default=None, description="accepted and ignored: nothing is stored")
    metadata: Metadata | None = Field(default=None, description=_IGNORED)
    include: _Ignored = None
    reasoning: _Ignored = None
    stream_options: _Ignored = None
    max_tool_calls: _Ignored = None
    truncation: _IgnoredText = None
    service_tier: _IgnoredText = None
    safety_identifier: _IgnoredText = None
    prompt_cache_key: _IgnoredText = None
    prompt_cache_options: _Ignored = None
    prompt_cache_retention: _IgnoredText = None
    user: _IgnoredText = None

    @model_validator(mode="after")
    def _no_state(self) -> ResponseFields:
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise field_error(name, _STATELESS, UNSUPPORTED)
        if self.background:
            raise field_error("background", "is not offered", UNSUPPORTED)
        return self

    @property
    def usage_wanted(self) -> bool:
        """The end of a stream has it anyway."""
        return False

    def job(self) -> TextJob:
        """The job of the chat that this means. Raises `Invalid`."""
        try:
            return ChatFields.model_validate(self._chat()).with_warnings(self.warnings).job()
        except ValidationError as error:
            first = error.errors()[0]
            field = _FIELDS.get(str(first["loc"][0]), str(first["loc"][0])) if first["loc"] else None
            message = first["ctx"]["message"] if first["type"] == FIELD else _CONVERSATIONS.get(first["type"], _NONE)
            raise Invalid(field, message, INVALID_VALUE) from None
        except Invalid as error:
            raise error.of(_FIELDS.get(error.field or "", error.field or "input")) from error

    def _chat(self) -> dict[str, Any]:
        """The body of the chat."""
        format, choice = self.text.format if self.text is not None else None, self.tool_choice
        functions = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in self.tools or ()]
        if isinstance(choice, FunctionChoice):
            named: Any = {"type": "function", "function": {"name": choice.name}}
        else:
            named = choice
        response_format: dict[str, Any] | None = None
        if format is not None:
            schema = None if format.json_schema is None else {"name": "answer", "schema": format.json_schema}
            response_format = {"type": format.type, "json_schema": schema}
        return {
            "messages": self._messages(), "max_tokens": self.max_output_tokens, "temperature": self.temperature,
            "top_p": self.top_p, "seed": self.seed, "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": named, "response_format": response_format,
        }  # fmt: skip

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation as a chat's: calls belong to the assistant's message before them."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, FunctionOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            elif isinstance(item, FunctionCallItem):
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages
