"""Text requests: OpenAI's fields of chats and completions, our own below them, and the job they describe.

Only the worker can check the model's context, since it counts tokens. null means not given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from contract.bodies import InBody, with_fields_of
from contract.bounds import LIST, MAX_DEADLINE_S, MAX_SEED, NOTHING, OBJECT, WORD, check_text
from contract.card import MAX_CHOICES, TextOffer
from contract.errors import UNSUPPORTED, Invalid
from contract.field_names import RANDOM
from contract.json_schema import check_json_schema
from contract.strict import MAX_IGNORED, MAX_NAME, StrictModel, at_most, field_error
from contract.tools import CALLS, MAX_CALLS, MAX_TOOLS, PLAIN, TOOLS, NamedTool, Tool, ToolCall, texts_in, tools_of

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 131_072  # of a job: tokens of all prompts × answers × (1 + the likeliest)
MAX_BIAS = 100.0
MAX_MESSAGES = 1000
MAX_PARTS = 1000  # of a message
MAX_BIASED = 1024  # tokens per request
MAX_KEYWORDS = 1000  # of a JSON schema, at its top
MAX_METADATA = 16  # as in OpenAI's API
MAX_STOPS = 4  # as in OpenAI's API
MAX_STOP_CHARACTERS = 256
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_REPETITION = 10.0
MAX_CHARACTERS = 1_000_000  # of a whole job; the model's context is counted in tokens
_COMPLETION_TOKENS = 16  # OpenAI's default, for completions only
_TOKEN_CHARACTERS = 4  # per token, estimated
_TOKEN = re.compile(r"0|[1-9][0-9]{0,9}")
_IGNORED = "accepted and ignored"
_Ignored = Annotated[str | None, Field(max_length=MAX_IGNORED, description=_IGNORED)]
_Anything = Annotated[Any, Field(description=_IGNORED)]
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


def _choice(value: Any) -> str:
    return WORD if isinstance(value, str) else NOTHING if value is None else OBJECT


def _kind(value: Any) -> str:
    return WORD if isinstance(value, str) else NOTHING if value is None else LIST


_StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    Annotated[_StopText, Tag(WORD)] | Annotated[list[_StopText], Field(max_length=MAX_STOPS), Tag(LIST)],
    Discriminator(_kind),
]


_Word = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[_Word, _Word], Field(max_length=MAX_METADATA), at_most(MAX_METADATA)]


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(default=None, description="true: a last chunk tells the usage")
    include_obfuscation: bool | None = Field(default=None, description=_IGNORED)


@dataclass(frozen=True, slots=True)
class TextJob:
    """The request in a job's record: `n` answers to its `messages`, or to each of its `prompts`, as texts or token ids.

    The answers have consecutive seeds from `seed`. `logprobs` n requests log probabilities of the tokens and the n most
    likely, `json_schema` is a schema as text. `echo` begins each text with its prompt: by the worker where it has log
    probabilities (`scores_prompts`), else by the API. `tools` are those that an answer may call, or must if
    `tools_required`; calls are written in `tool_format`, of `contract.tools`. `warnings` are for people. None leaves a
    value to the worker.
    """

    expand_prompt: ClassVar[bool] = False  # options of images
    cascade: ClassVar[None] = None

    messages: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), "how many answers, 1 by default"] = 1
    max_tokens: Annotated[int | None, Field(ge=1), "of the answer, at most"] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED), "equal seeds give equal answers"] = None
    stop: Annotated[list[str] | None, InBody(Stop), "up to four texts that end the answer and are left out"] = None
    temperature: Annotated[
        float | None, Field(ge=0, le=MAX_TEMPERATURE), "1 by default; 0: always the likeliest token"
    ] = None
    top_p: Annotated[float | None, Field(gt=0, le=1), "1 by default"] = None
    top_k: Annotated[int | None, Field(ge=0, le=1_000_000), "0, the default: all tokens"] = None
    min_p: Annotated[float | None, Field(ge=0, le=1), "0 by default"] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=MAX_REPETITION), "1 by default"] = None
    presence_penalty: Annotated[float | None, Field(ge=-MAX_PENALTY, le=MAX_PENALTY), "0 by default"] = None
    frequency_penalty: Annotated[float | None, Field(ge=-MAX_PENALTY, le=MAX_PENALTY), "0 by default"] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        Field(max_length=MAX_BIASED),
        "by token id, -100 to 100: added to the token's logit; -100: never it, 100: it alone",
    ] = None
    logprobs: int | None = None
    json_schema: str | None = None
    echo: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tools_required: bool | None = None
    tool_format: str | None = None
    parallel_tool_calls: bool | None = None
    warnings: list[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON, without fields that are None."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> TextJob:
        """Parse what `to_dict` wrote; values are checked where tokens are counted."""
        return cls(**{name: record[name] for name in cls.__slots__ if record.get(name) is not None})

    def files(self) -> set[str]:
        """The worker's files that it names, as of images: none."""
        return set()

    @property
    def count(self) -> int:
        """The number of answers over all prompts."""
        return self.n * len(self.prompts or [None])

    @property
    def scores_prompts(self) -> bool:
        """Return whether log probabilities of the prompts' tokens are requested."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def tokens(self) -> float:
        """The estimated number of prompt tokens."""
        if self.messages is not None:
            texts = texts_in([*self.messages, *(self.tools or ())])
            return sum(map(len, texts)) / _TOKEN_CHARACTERS
        prompts = self.prompts or []
        return sum(len(text) / (_TOKEN_CHARACTERS if isinstance(text, str) else 1) for text in prompts)

    def check(self, offer: TextOffer) -> None:
        """Raise `Invalid` for the first field that the model does not offer."""
        if self.count > offer.max_choices:
            raise Invalid("n", f"n times the number of prompts must be at most {offer.max_choices}")
        if self.max_tokens is not None and offer.context and self.max_tokens >= offer.context:
            raise Invalid("max_tokens", f"must be less than the model's context of {offer.context} tokens")
        if len(self.logit_bias or ()) > offer.max_logit_bias:
            raise Invalid("logit_bias", _OLDER)
        if (self.scores_prompts or self.max_tokens == 0) and not offer.max_prompt_logprobs:
            raise Invalid("echo", _OLDER)
        if self.tools and offer.tool_format not in CALLS:
            raise Invalid(TOOLS, _OTHER_CALLS if offer.tool_format else _OLDER, UNSUPPORTED)

    def complete(self, offer: TextOffer) -> TextJob:
        """The job for this model, which `check` accepts: in its format of calls, if it has any."""
        if not self.tools:
            return self
        if offer.tool_format == PLAIN and not self.tools_required:
            return replace(self, tools=None, warnings=[*(self.warnings or ()), _NO_TOOLS])
        return replace(self, tool_format=offer.tool_format)


_OLDER = "is not known to the worker of this model, which is of an older version"
_NO_TOOLS = "tools: the model's chat template has none: it answers with text, unless tool_choice requires a call"
_OTHER_CALLS = (
    "the calls of this model's chat template are in a format that is not read here: Llama's JSON and Hermes's are"
)


@with_fields_of(TextJob)
class TextFields(StrictModel):
    """Fields shared by chats and completions."""

    if TYPE_CHECKING:
        n: int | None
        max_tokens: int | None
        stop: str | list[str] | None
        logit_bias: dict[str, float] | None

    model: Annotated[
        str | None, Field(max_length=MAX_NAME), "a name from /v1/models; default: the first that is live there"
    ] = None
    stream: Annotated[bool | None, "true: server-sent events"] = None
    stream_options: StreamOptions | None = None
    user: Annotated[str | None, Field(max_length=MAX_IGNORED), _IGNORED] = None
    prompt_cache_key: Annotated[
        str | None, Field(max_length=MAX_IGNORED), "accepted and ignored: equal beginnings are found"
    ] = None
    deadline_s: Annotated[float | None, Field(gt=0, le=MAX_DEADLINE_S), "from now; then the job expires"] = None
    priority: Annotated[int | None, Field(ge=0, le=9), "0 is the most urgent, 5 the default"] = None

    @field_validator("seed", mode="before", check_fields=False)
    @classmethod
    def _random(cls, value: Any) -> Any:
        return None if type(value) is int and value == RANDOM else value

    @field_validator("logit_bias", mode="before", check_fields=False)
    @classmethod
    def _biases_of_tokens(cls, value: Any) -> Any:
        if isinstance(value, dict) and not all(map(_is_bias, value, value.values())):
            raise PydanticCustomError("logit_bias", "token ids and numbers")
        return value

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def _job(self, **extra: Any) -> TextJob:
        """The job of these fields, with those specific to this kind. Raises `Invalid`."""
        for stop in self.stops:
            if not stop:
                raise Invalid("stop", "must not be empty")
            check_text("stop", stop, MAX_STOP_CHARACTERS)
        shared = {name: getattr(self, name) for name in TextJob.__slots__ if name in TextFields.model_fields}
        shared |= {"n": self.n or 1, "stop": self.stops or None, "logit_bias": self.logit_bias or None}
        request = self.given
        unused = (name for name, usual in _WITHOUT_EFFECT.items() if request.get(name, usual) != usual)
        warnings = [*self.warnings, *(f"{name}: has no effect" for name in unused)]
        return TextJob(**{**shared, **extra, "warnings": warnings or None})

    @property
    def usage_wanted(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> TextFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "only with stream")
        return self


_WITHOUT_EFFECT = {"reasoning_effort": "none", "verbosity": "medium", "store": False}
"""Fields that change nothing, though a client may count on them, and the value that asks for nothing else."""


def _is_bias(token: Any, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return _TOKEN.fullmatch(token) is not None and number and abs(value) <= MAX_BIAS


class TextPart(StrictModel):
    type: Literal["text", "refusal"]
    text: str | None = Field(default=None, max_length=MAX_CHARACTERS)
    refusal: str | None = Field(default=None, max_length=MAX_CHARACTERS, description="of the type refusal")
    annotations: _Anything = None
    prompt_cache_breakpoint: _Anything = None
    cache_control: _Anything = None

    @model_validator(mode="after")
    def _has_text(self) -> TextPart:
        if getattr(self, self.type) is None:
            raise field_error(self.type, "must be given", "missing_required_parameter")
        return self


class Message(StrictModel):
    """A message: a request's own, an earlier answer as it was sent, by this or another service, or a tool's result."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="developer is taken for system"
    )
    content: Annotated[
        Annotated[str, Field(max_length=MAX_CHARACTERS), Tag(WORD)]
        | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag(LIST)]
        | Annotated[None, Tag(NOTHING)],
        Discriminator(_kind),
    ] = None
    name: _Ignored = None
    refusal: Annotated[str | None, Field(max_length=MAX_CHARACTERS, description="read where there is no content")] = (
        None
    )
    annotations: _Anything = None
    parsed: _Anything = None
    tool_calls: Annotated[
        list[ToolCall] | None, Field(max_length=MAX_CALLS, fail_fast=True, description="of an assistant's message")
    ] = None
    tool_call_id: Annotated[
        str | None, Field(max_length=MAX_NAME, description="of the call that a tool's message answers")
    ] = None
    function_call: _NoFunction = None
    audio: _NoAudio = None
    reasoning: _Anything = None
    reasoning_content: _Anything = None
    reasoning_details: _Anything = None
    thinking_blocks: _Anything = None
    provider_specific_fields: _Anything = None

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
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal or "" for part in self.content)
        return self.refusal or "" if self.content is None else self.content


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates read them: a tool's result has the name of the function that was called."""
    names: dict[str, str] = {}
    read: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": message.text}
        if message.tool_calls:
            entry["tool_calls"] = [call.message() for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
            if name := message.name or names.get(message.tool_call_id):
                entry["name"] = name
        for text in texts_in(entry):
            check_text("messages", text, MAX_CHARACTERS)
        read.append(entry)
    return read


class JsonSchema(StrictModel):
    name: str = Field(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: _Ignored = None
    strict: bool | None = Field(default=None, description="accepted and ignored: answers always fit the schema")
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema", max_length=MAX_KEYWORDS)


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
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


class ChatFields(TextFields):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(title="ChatRequest", json_schema_extra={"examples": _CHATS})

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="the newer name of max_tokens")
    logprobs: bool | None = Field(default=None, description="true: log probabilities of the answer's tokens")
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="and of so many of the likeliest")
    response_format: ResponseFormat | None = None
    metadata: Metadata | None = Field(default=None, description=_IGNORED)
    store: bool | None = Field(default=None, description=_IGNORED)
    service_tier: _Ignored = None
    reasoning_effort: _Ignored = None
    verbosity: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_options: _Anything = None
    prompt_cache_retention: _Ignored = None
    prediction: Annotated[Any, Field(description="accepted and ignored: it changes no answer")] = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call")
    tools: list[Tool] | None = Field(
        default=None, max_length=MAX_TOOLS, fail_fast=True, description="functions that the answer may call"
    )
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag(WORD)]
        | Annotated[NamedTool, Tag(OBJECT)]
        | Annotated[None, Tag(NOTHING)],
        Discriminator(_choice),
    ] = Field(default=None, description="whether it calls any; required: one at least; or the one that it calls")
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

    @model_validator(mode="after")
    def _together(self) -> ChatFields:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "only with logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "max_completion_tokens", "max_tokens and max_completion_tokens are two names of one limit"
            )
        response_format = self.response_format
        if response_format is not None and (response_format.type == "json_schema") != (
            response_format.json_schema is not None
        ):
            raise PydanticCustomError("response_format", "a schema with json_schema, and only there")
        return self

    def job(self) -> TextJob:
        """The job of this request. Raises `Invalid`."""
        return self._job(
            messages=template_messages(self.messages),
            **self._tools(),
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            json_schema=self._schema_text(),
        )

    def _tools(self) -> dict[str, Any]:
        """The job's fields of tools. Raises `Invalid`."""
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        required = name is not None or choice == "required"
        if required and not self.tools:
            raise Invalid("tool_choice", "needs tools")
        if not self.tools or choice == "none":
            return {"parallel_tool_calls": None}
        constrained = required or any(tool.function.strict for tool in self.tools)
        tools = tools_of(self.tools, name, constrained=constrained)
        for text in texts_in(tools):
            check_text(TOOLS, text, MAX_CHARACTERS)
        parallel = False if name is not None else self.parallel_tool_calls
        return {"tools": tools, "tools_required": required or None, "parallel_tool_calls": parallel}

    def _schema_text(self) -> str | None:
        """The JSON schema for the answers, as text; None for any text. Raises `Invalid` for one beyond its bounds."""
        response_format = self.response_format
        if response_format is None or response_format.type == "text":
            return None
        if response_format.json_schema is None:
            return '{"type":"object"}'
        return check_json_schema(response_format.json_schema.json_schema or {})


_COMPLETIONS: Any = [
    {"prompt": "A man riding a", "max_tokens": 20},
    {"prompt": "A man riding a horse", "echo": True, "logprobs": 1, "max_tokens": 0},
]


class CompletionFields(TextFields):
    """`POST /v1/completions`."""

    model_config = ConfigDict(title="CompletionRequest", json_schema_extra={"examples": _COMPLETIONS})

    prompt: Annotated[
        Annotated[str, Field(max_length=MAX_CHARACTERS), Tag(WORD)]
        | Annotated[list[Any], Field(min_length=1, max_length=100_000), Tag(LIST)],
        Discriminator(_kind),
    ] = Field(description="a text, texts, a list of token ids, or several of them")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="of the tokens and the likeliest")
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="must be n: all are returned")
    max_tokens: int | None = Field(
        default=None, ge=0, description="of the answer, at most; 16 by default; 0, only with echo: the prompt alone"
    )
    echo: bool | None = Field(
        default=None, description="true: texts begin with their prompt, and logprobs are of its tokens too"
    )
    suffix: Literal[""] | None = Field(default=None, description="not offered")

    @field_validator("prompt")
    @classmethod
    def _prompts_of_one_kind(cls, value: str | list[Any]) -> str | list[Any]:
        if isinstance(value, str):
            return value
        first = _tokens(value)
        if not first and not all(isinstance(item, str) for item in value) and not all(map(_tokens, value)):
            raise PydanticCustomError("prompt", "texts or token ids")
        return value

    @model_validator(mode="after")
    def _all_of_them(self) -> CompletionFields:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise PydanticCustomError("best_of", "must be n")
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "must be at least 1 without echo")
        if self.echo and self.logprobs is None and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise field_error("echo", "needs prompts that are texts, or logprobs")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return [self.prompt] if isinstance(self.prompt, str) or _tokens(self.prompt) else self.prompt

    def job(self) -> TextJob:
        """The job of this request. Raises `Invalid`."""
        for prompt in self.prompts:
            if isinstance(prompt, str):
                check_text("prompt", prompt, MAX_CHARACTERS)
        limit = _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._job(prompts=self.prompts, max_tokens=limit, logprobs=self.logprobs, echo=self.echo or None)


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
