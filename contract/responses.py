"""OpenAI's Responses API, without state: its body, whose job is that of the chat that means the same.

An `input` brings its whole conversation: nothing is stored that a later request could refer to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from contract.bounds import LIST, MAX_SEED, OBJECT
from contract.errors import UNSUPPORTED, Invalid
from contract.json_schema import AnswerSchema, FormatType, SchemaName, schema_text
from contract.messages import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    READS_TEXT,
    Called,
    Conversation,
    Part,
    Words,
    text_of,
)
from contract.strict import MAX_IGNORED, MAX_NAME, IgnoredText, IgnoredValue, StrictModel, field_error
from contract.text import BY_KIND, MAX_TEMPERATURE, TOOL_CHOICE, ConversationBody, TextJob, ToolChoice
from contract.tools import MAX_TOOLS, Function, FunctionName, tool_values

_STATELESS = "no response is stored here: send the whole conversation as input, with store: false where a client has it"
_TOO_LONG = f"has more than {MAX_MESSAGES} messages with the instructions, or {MAX_CALLS} calls after one another"
ITEMS = ("(message)", "(function_call)", "(function_call_output)", "(reasoning)", "(item_reference)")  # tags, as WORD
_MESSAGE, _CALL, _OUTPUT, _REASONING, _REFERENCE = ITEMS


def _type(value: Any) -> str:
    """The tag of an item by its type, which a message need not say."""
    kind = value.get("type") if isinstance(value, dict) else None
    return _MESSAGE if kind is None else f"({kind})" if isinstance(kind, str) else OBJECT


class InputPart(Part):
    type: Annotated[Literal["input_text", "output_text", "text", "refusal"], READS_TEXT]
    logprobs: IgnoredValue = None


_Text = Annotated[Words | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag(LIST)], BY_KIND]


class _Item(StrictModel):
    """What is null in it is left out, whatever its name: a client writes down fields that no answer here has."""

    id: IgnoredText = None
    status: IgnoredText = None

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class InputMessage(_Item):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text
    phase: IgnoredText = None


class FunctionCallItem(_Item, Called):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=MAX_NAME)


class FunctionOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=MAX_NAME)
    output: _Text


class ReasoningItem(_Item):
    """Accepted and ignored."""

    type: Literal["reasoning"]
    summary: IgnoredValue = None
    content: IgnoredValue = None
    encrypted_content: IgnoredValue = None


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


class FunctionChoice(FunctionName):
    """The one function that the answer calls."""

    type: Literal["function"]


class TextFormat(AnswerSchema):
    type: FormatType
    name: SchemaName | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise field_error("schema", "must be given where the type is json_schema, and only there")
        return self


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: IgnoredText = None


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


class ResponseFields(ConversationBody):
    """`POST /v1/responses`."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {
        "messages": "input", "max_tokens": "max_output_tokens", "json_schema": "text.format",
    }  # fmt: skip
    model_config = ConfigDict(title="ResponseRequest", json_schema_extra={"examples": _EXAMPLES})

    input: Annotated[
        Words | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag(LIST)],
        BY_KIND,
    ] = Field(description="a text, or the whole conversation: messages, calls of functions and their results")
    instructions: Words | None = Field(default=None, description="a message of the system")
    max_output_tokens: int | None = Field(default=None, ge=1, description="of the answer, at most")
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice[FunctionChoice] = Field(default=None, description=TOOL_CHOICE)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, description="equal seeds give equal answers")
    previous_response_id: str | None = Field(default=None, max_length=MAX_IGNORED, description="not offered")
    conversation: Any = Field(default=None, description="not offered")
    prompt: Any = Field(default=None, description="not offered")
    background: bool | None = Field(default=None, description="not offered: only false is accepted")
    top_logprobs: int | None = Field(default=None, ge=0, le=0, description="not offered: only 0 is accepted")
    include: IgnoredValue = None
    reasoning: IgnoredValue = None
    stream_options: IgnoredValue = None
    max_tool_calls: IgnoredValue = None
    truncation: IgnoredText = None

    @model_validator(mode="after")
    def _no_state(self) -> ResponseFields:
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                raise field_error(name, _STATELESS, UNSUPPORTED)
        if self.background:
            raise field_error("background", "is not offered", UNSUPPORTED)
        return self

    def job(self) -> TextJob:
        """The job of the chat that this means. Raises `Invalid`."""
        format = None if self.text is None else self.text.format
        try:
            return self._job(
                messages=self._messages(),
                **tool_values(self.tools or (), self.tool_choice, self.parallel_tool_calls),
                max_tokens=self.max_output_tokens,
                json_schema=None if format is None else schema_text(format.type, format),
            )
        except Invalid as error:
            raise error.of(self.FIELD_NAMES.get(error.field or "", error.field or "input")) from error

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation: calls belong to the assistant's message before them."""
        conversation = Conversation()
        if self.instructions is not None:
            conversation.add("system", self.instructions)
        for item in (InputMessage(role="user", content=self.input),) if isinstance(self.input, str) else self.input:
            if isinstance(item, InputMessage):
                conversation.add(item.role, text_of(item.content))
            elif isinstance(item, FunctionOutputItem):
                conversation.add("tool", text_of(item.output), item.call_id)
            elif isinstance(item, FunctionCallItem):
                conversation.add_call(item.call_id, item)
        messages = conversation.messages
        if not messages:
            raise Invalid("input", "has no message")
        if len(messages) > MAX_MESSAGES or any(len(entry.get("tool_calls", ())) > MAX_CALLS for entry in messages):
            raise Invalid("input", _TOO_LONG)
        return messages
