"""OpenAI's chats: their body, and messages in its shape."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Tag, field_validator, model_validator

from contract.bounds import LIST, NOTHING
from contract.errors import UNSUPPORTED
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
from contract.strict import IGNORED, MAX_NAME, IgnoredText, IgnoredValue, StrictModel, at_most, field_error
from contract.text import (
    BY_KIND,
    MAX_LOGPROBS,
    MAX_TEMPLATE_OPTIONS,
    NO_LIMIT,
    TOOL_CHOICE,
    ConversationBody,
    TextFields,
    TextJob,
    ToolChoice,
)
from contract.tools import MAX_TOOLS, NamedTool, Tool, tool_values

_FUNCTIONS = "is of an older API; tools and tool_choice take its place"


def _refused(message: str, *harmless: Any) -> BeforeValidator:
    """Refuse all values but null and these, in which a client says that it does not use the field."""

    def check(value: Any) -> Any:
        if value is not None and not any(value == other and type(value) is type(other) for other in harmless):
            raise field_error("", message, UNSUPPORTED)
        return value

    return BeforeValidator(check)


_NoFunctions = Annotated[
    Annotated[list[None], Field(max_length=0)] | None, _refused(_FUNCTIONS, []), Field(description="not offered")
]
_NoFunction = Annotated[None, _refused(_FUNCTIONS), Field(description="not offered")]
_NoFunctionCall = Annotated[
    Literal["none", "auto"] | None, _refused(_FUNCTIONS, "none", "auto"), Field(description="not offered")
]
_NoAudio = Annotated[None, _refused("audio is not offered"), Field(description="not offered")]


class TextPart(Part):
    type: Annotated[Literal["text", "refusal"], READS_TEXT]
    prompt_cache_breakpoint: IgnoredValue = None
    cache_control: IgnoredValue = None


class CalledFunction(Called):
    parsed_arguments: IgnoredValue = None


class ToolCall(StrictModel):
    """A call of an earlier answer."""

    id: str = Field(max_length=MAX_NAME)
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = Field(default=None, description=IGNORED)
    extra_content: IgnoredValue = None


class Message(StrictModel):
    """A message: a request's own, an earlier answer as it was sent, by this or another service, or a tool's result."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is taken for system"
    )
    content: Annotated[
        Words
        | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag(LIST)]
        | Annotated[None, Tag(NOTHING)],
        BY_KIND,
    ] = None
    name: IgnoredText = None
    refusal: Words | None = Field(default=None, description="read where there is no content")
    annotations: IgnoredValue = None
    parsed: IgnoredValue = None
    tool_calls: Annotated[
        list[ToolCall] | None, Field(max_length=MAX_CALLS, fail_fast=True, description="of an assistant's message")
    ] = None
    tool_call_id: Annotated[
        str | None, Field(max_length=MAX_NAME, description="of the call that a tool's message answers")
    ] = None
    function_call: _NoFunction = None
    audio: _NoAudio = None
    reasoning: IgnoredValue = None
    reasoning_content: IgnoredValue = None
    reasoning_details: IgnoredValue = None
    thinking_blocks: IgnoredValue = None
    provider_specific_fields: IgnoredValue = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise field_error("tool_calls", "are of an assistant's message")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise field_error("tool_call_id", "must be given in a tool's message, and only there")
        if self.content is None and not self.tool_calls and (self.role != "assistant" or self.refusal is None):
            raise field_error("content", "must be given", "missing_required_parameter")
        return self

    @property
    def text(self) -> str:
        return self.refusal or "" if self.content is None else text_of(self.content)


class JsonSchema(AnswerSchema):
    name: SchemaName


class ResponseFormat(StrictModel):
    type: FormatType
    json_schema: JsonSchema | None = None


_TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
_CHATS: Any = [
    {"messages": [{"role": "user", "content": "a cat"}], "max_tokens": 20, "seed": 7},
    {"messages": [{"role": "user", "content": "Is it warm?"}], "tools": _TOOLS, "tool_choice": "auto"},
    {
        "messages": [
            {"role": "user", "content": "Is it warm?"},
            {"role": "assistant", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
        ],
        "tools": _TOOLS,
    },
]


_NOT_OPTIONS = (
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip
_OPTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MOST_OPTION = 1000  # characters of a text


def _are_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not _OPTION.fullmatch(name) or name in _NOT_OPTIONS:
            raise field_error("", f"must have names of letters, digits and _, and none of {', '.join(_NOT_OPTIONS)}")
        if not isinstance(value, str | int | float) or (isinstance(value, str) and len(value) > _MOST_OPTION):
            raise field_error(
                "", f"must have values that are true, false, numbers, or texts of {_MOST_OPTION} characters"
            )
    return options


TemplateOptions = Annotated[
    dict[str, Any],
    Field(max_length=MAX_TEMPLATE_OPTIONS),
    at_most(MAX_TEMPLATE_OPTIONS),
    AfterValidator(_are_options),
]


class ChatFields(TextFields, ConversationBody):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(title="ChatRequest", json_schema_extra={"examples": _CHATS})

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the newer name of max_tokens")
    logprobs: bool | None = Field(default=None, description="true: log probabilities of the answer's tokens")
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="and of so many of the likeliest")
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Annotated[
        TemplateOptions | None, Field(description="what the model's chat template is given besides")
    ] = None
    reasoning_effort: IgnoredText = None
    verbosity: IgnoredText = None
    prediction: Annotated[Any, Field(description=f"{IGNORED}: it changes no answer")] = None
    tools: list[Tool] | None = Field(
        default=None, max_length=MAX_TOOLS, fail_fast=True, description="functions that the answer may call"
    )
    tool_choice: ToolChoice[NamedTool] = Field(default=None, description=TOOL_CHOICE)
    functions: _NoFunctions = None
    function_call: _NoFunctionCall = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(max_length=1)] | None, _refused("only text is offered", ["text"])
    ] = None
    audio: _NoAudio = None
    web_search_options: Annotated[
        None, _refused("a search of the web is not offered"), Field(description="not offered")
    ] = None
    moderation: Annotated[None, _refused("moderation is not offered"), Field(description="not offered")] = None

    @field_validator("max_tokens", "max_completion_tokens", mode="before", check_fields=False)
    @classmethod
    def _no_limit(cls, value: Any) -> Any:
        return None if type(value) is int and value == NO_LIMIT else value

    @model_validator(mode="after")
    def _together(self) -> ChatFields:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise field_error("max_completion_tokens", "is another name of max_tokens; give one of them")
        format = self.response_format
        if format is not None and (format.type == "json_schema") != (format.json_schema is not None):
            raise field_error(
                "response_format", "must have a json_schema where its type is json_schema, and only there"
            )
        return self

    def job(self) -> TextJob:
        """The job of this request. Raises `Invalid`."""
        conversation = Conversation()
        for message in self.messages:
            conversation.add(message.role, message.text, message.tool_call_id, message.name)
            for call in message.tool_calls or ():
                conversation.add_call(call.id, call.function)
        given, format = self.given, self.response_format
        unused = (name for name, usual in _WITHOUT_EFFECT.items() if given.get(name, usual) != usual)
        choice = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        return self._job(
            messages=conversation.messages,
            **tool_values([tool.function for tool in self.tools or ()], choice, self.parallel_tool_calls),
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=None if format is None else schema_text(format.type, format.json_schema),
            chat_template_kwargs=self.chat_template_kwargs or None,
            warnings=[*self.warnings, *(f"{name}: has no effect" for name in unused)] or None,
        )


_WITHOUT_EFFECT = {"reasoning_effort": "none", "verbosity": "medium", "store": False}
"""Fields that change nothing, though a client may count on them, and the value that asks for nothing else."""
