"""Text requests: the job that each of OpenAI's three bodies describes, the fields that they share, and completions.

Chats are in `contract/chat.py`, responses in `contract/responses.py`. Only the worker can check the model's context,
since it counts tokens. null means not given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from contract.bodies import InBody, declarations, with_fields_of
from contract.bounds import LIST, MAX_DEADLINE_S, MAX_SEED, NOTHING, OBJECT, WORD, check_text
from contract.card import MAX_CHOICES, TextOffer
from contract.errors import CONTEXT_LENGTH, UNSUPPORTED, Invalid
from contract.field_names import RANDOM
from contract.messages import MAX_CHARACTERS, Words
from contract.strict import IGNORED, MAX_NAME, IgnoredText, IgnoredValue, StrictModel, at_most, field_error
from contract.tools import CALLS, MESSAGES, PLAIN, TOOLS, texts_in

MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 131_072  # of a job: tokens of all prompts × answers × (1 + the likeliest)
MAX_BIAS = 100.0
MAX_BIASED = 1024  # tokens per request
MAX_METADATA = 16  # as in OpenAI's API
MAX_STOPS = 16  # OpenAI's API has 4
MAX_STOP_TOKENS = 128
MAX_TEMPLATE_OPTIONS = 16
MAX_STOP_CHARACTERS = 256
MAX_TOKENS = 10_000_000  # of an answer, at most, whatever the model
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_REPETITION = 10.0
MAX_LENGTH_PENALTY = 10.0
MAX_INPUTS = 2048  # of an embedding request, as in OpenAI's API
MAX_INPUT_TOKENS = 300_000  # of all inputs, as there
MAX_EMBEDDED = 2**21  # numbers of all embeddings of a request
NO_EMBEDDINGS, EMBEDS_ONLY = "gives no embeddings", "gives embeddings only"
NO_LIMIT = -1  # of tokens, as other servers have it
_COMPLETION_TOKENS = 16  # OpenAI's default, for completions only
_TOKEN_CHARACTERS = 4  # per token, estimated
_TOKEN = re.compile(r"0|[1-9][0-9]{0,9}")


def _kind(value: Any) -> str:
    return WORD if isinstance(value, str) else NOTHING if value is None else LIST if isinstance(value, list) else OBJECT


BY_KIND = Discriminator(_kind)
"""Chooses among the tags of a union by the kind of a value."""

_Choice = TypeVar("_Choice")
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(WORD)]
    | Annotated[_Choice, Tag(OBJECT)]
    | Annotated[None, Tag(NOTHING)],
    BY_KIND,
]
"""A body's `tool_choice`, with its model that names one function."""
TOOL_CHOICE = "whether it calls any; required: one at least; or the one that it calls"

_StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    Annotated[_StopText, Tag(WORD)] | Annotated[list[_StopText], Field(max_length=MAX_STOPS), Tag(LIST)], BY_KIND
]
_Word = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[_Word, _Word], Field(max_length=MAX_METADATA), at_most(MAX_METADATA)]


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(default=None, description="true: a last chunk tells the usage")
    include_obfuscation: bool | None = Field(default=None, description=IGNORED)


@dataclass(frozen=True, slots=True)
class TextJob:
    """The request in a job's record: `n` answers to its `messages`, or to each of its `prompts`, as texts or token ids.

    The answers have consecutive seeds from `seed`. `logprobs` n requests log probabilities of the tokens and the n most
    likely, `json_schema` is a schema as text. `echo` begins each text with its prompt: by the worker where it has log
    probabilities (`scores_prompts`), else by the API. `tools` are those that an answer may call, or must if
    `tools_required`; calls are written in `tool_format`, of `contract.tools`. `warnings` are for people. `embedding`,
    an encoding of OpenAI's API, requests the prompts' embeddings, of so many `dimensions`, in place of answers. None
    leaves a value to the worker. `best_of` is the width of a beam search, if it is not `n`;
    `adapter` is the model's LoRA.
    """

    messages: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), "how many answers, 1 by default"] = 1
    max_tokens: Annotated[int | None, Field(ge=1), "of the answer, at most"] = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED), "equal seeds give equal answers"] = None
    stop: Annotated[list[str] | None, InBody(Stop), "up to 16 texts that end the answer and are left out"] = None
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
    min_tokens: Annotated[
        int | None, Field(ge=0, le=MAX_TOKENS), "0 by default: before that many the answer does not end"
    ] = None
    ignore_eos: Annotated[bool | None, "true: the model's own end does not end the answer"] = None
    stop_token_ids: Annotated[
        list[int] | None, Field(max_length=MAX_STOP_TOKENS), "tokens that end the answer and are left out"
    ] = None
    use_beam_search: Annotated[bool | None, "true: the n best answers of a beam search of this width"] = None
    length_penalty: Annotated[
        float | None,
        Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY),
        "of beams, 1 by default: more for longer ones",
    ] = None
    early_stopping: Annotated[bool | None, "true: beams end once as many answers as the width have ended"] = None
    best_of: int | None = None
    logprobs: int | None = None
    json_schema: str | None = None
    echo: bool | None = None
    adapter: str | None = None
    tools: list[dict[str, Any]] | None = None
    tools_required: bool | None = None
    tool_format: str | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    warnings: list[str] | None = None
    embedding: str | None = None
    dimensions: int | None = None

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
    def beams(self) -> int:
        """The width of a beam search; 0: there is none."""
        return (self.best_of or self.n) if self.use_beam_search else 0

    @property
    def count(self) -> int:
        """The number of answers, or beams, over all prompts."""
        return max(self.n, self.beams) * len(self.prompts or [None])

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
        self._check_length(offer)
        if self.embedding is not None:
            self._check_embeddings(offer)
            return
        if not offer.generates:
            raise Invalid("model", EMBEDS_ONLY, UNSUPPORTED)
        if self.count > offer.max_choices:
            raise Invalid("n", f"n times the number of prompts must be at most {offer.max_choices}")
        if self.max_tokens is not None and offer.context and self.max_tokens >= offer.context:
            raise Invalid("max_tokens", f"must be less than the model's context of {offer.context} tokens")
        if len(self.logit_bias or ()) > offer.max_logit_bias:
            raise Invalid("logit_bias", _OLDER)
        if (self.scores_prompts or self.max_tokens == 0) and not offer.max_prompt_logprobs:
            raise Invalid("echo", _OLDER)
        if self.beams and not offer.beam_search:
            raise Invalid("use_beam_search", _OLDER)
        for name in LATER_OPTIONS:
            if getattr(self, name) and name not in offer.options:
                raise Invalid(name, _OLDER)
        if len(self.stop or ()) > (offer.max_stops or 4):  # as of workers that do not say
            raise Invalid("stop", f"must be at most {offer.max_stops or 4}, not {len(self.stop or ())}")
        if self.tools and offer.tool_format not in CALLS:
            raise Invalid(TOOLS, _OTHER_CALLS if offer.tool_format else _OLDER, UNSUPPORTED)

    def _check_length(self, offer: TextOffer) -> None:
        """Refuse prompts that cannot fit, by their bytes: before a worker counts tokens, and never one that fits."""
        room = offer.context - (self.embedding is None and self.max_tokens != 0)  # one token is to come at least
        field = MESSAGES if self.messages is not None else "prompt" if self.embedding is None else "input"
        least = [_least_tokens(prompt, offer.token_bytes) for prompt in self.prompts or []]
        if self.messages is not None:
            least.append(sum(_least_tokens(text, offer.token_bytes) for text in _user_texts(self.messages)))
        if offer.context and max(least, default=0) > room:
            words = f"at least {max(least)} tokens are more than the model's context of {offer.context}"
            raise Invalid(field, words, CONTEXT_LENGTH)
        if self.embedding is not None and sum(least) > MAX_INPUT_TOKENS:
            words = f"at least {sum(least)} tokens are more than the {MAX_INPUT_TOKENS} of a request"
            raise Invalid(field, words)

    def _check_embeddings(self, offer: TextOffer) -> None:
        width = offer.embedding_dimensions
        if not width:
            raise Invalid("model", NO_EMBEDDINGS, UNSUPPORTED)
        if self.dimensions is not None and not 1 <= self.dimensions <= width:
            raise Invalid("dimensions", f"must be between 1 and the model's {width}")
        if self.count * (self.dimensions or width) > MAX_EMBEDDED:
            most = MAX_EMBEDDED // (self.dimensions or width)
            raise Invalid("input", f"must be at most {most} inputs of {self.dimensions or width} dimensions each")

    def complete(self, offer: TextOffer) -> TextJob:
        """The job for this model, which `check` accepts: in its format of calls, if it has any."""
        if not self.tools:
            return self
        if offer.tool_format == PLAIN and not self.tools_required:
            return replace(self, tools=None, warnings=[*(self.warnings or ()), _NO_TOOLS])
        return replace(self, tool_format=offer.tool_format)


def _least_tokens(prompt: str | list[int], token_bytes: int) -> int:
    if isinstance(prompt, list):
        return len(prompt)
    return -(-len(prompt.encode("utf-8", "surrogatepass")) // token_bytes) if token_bytes else 0


def _user_texts(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The texts that every chat template shows, without the white space that some trim: not those of the assistant, of
    which templates leave out thoughts.
    """
    for message in messages:
        if message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            yield from (text.strip() for text in texts if isinstance(text, str))


LATER_OPTIONS = ("min_tokens", "ignore_eos", "stop_token_ids", "chat_template_kwargs")
"""Fields that not all workers read; a model's offer says which it does."""
_OLDER = "is not known to the worker that announced this model last, which is of an older version"
_NO_TOOLS = "tools: the model's chat template has none: it answers with text, unless tool_choice requires a call"
_OTHER_CALLS = (
    "the calls of this model's chat template are in a format that is not read here: Llama's JSON and Hermes's are"
)


class TextBody(StrictModel):
    """Fields of all three bodies. Those of `TextJob` that a body has go into its job as they are."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {}  # here, of fields of the job, where they differ

    model: str | None = Field(
        default=None, max_length=MAX_NAME, description="a name from /v1/models; default: the first that is live there"
    )
    stream: bool | None = Field(default=None, description="true: server-sent events")
    user: IgnoredText = None
    prompt_cache_key: Annotated[IgnoredText, Field(description=f"{IGNORED}: equal beginnings are found")] = None
    deadline_s: float | None = Field(
        default=None, gt=0, le=MAX_DEADLINE_S, allow_inf_nan=False, description="from now; then the job expires"
    )
    priority: int | None = Field(default=None, ge=0, le=9, description="0 is the most urgent, 5 the default")

    @property
    def usage_wanted(self) -> bool:
        """Return whether a stream of chunks ends with the numbers of tokens."""
        options = getattr(self, "stream_options", None)
        return isinstance(options, StreamOptions) and bool(options.include_usage)

    def job(self) -> TextJob:
        """The job of this request. Raises `Invalid`."""
        raise NotImplementedError

    def _job(self, **values: Any) -> TextJob:
        """The job of these fields, with those specific to this kind. Raises `Invalid`."""
        for field in (MESSAGES, TOOLS):
            for text in texts_in(values.get(field)):
                check_text(field, text, MAX_CHARACTERS)
        shared = {name: getattr(self, name, None) for name in declarations(TextJob)}
        values = {"warnings": [*self.warnings] or None, **shared, **values}
        return TextJob(**{name: value for name, value in values.items() if value is not None})


class ConversationBody(TextBody):
    """Fields of chats and responses."""

    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call")
    metadata: Metadata | None = Field(default=None, description=IGNORED)
    store: bool | None = Field(default=None, description=f"{IGNORED}: nothing is stored")
    service_tier: IgnoredText = None
    safety_identifier: IgnoredText = None
    prompt_cache_options: IgnoredValue = None
    prompt_cache_retention: IgnoredText = None


@with_fields_of(TextJob)
class TextFields(TextBody):
    """Fields shared by chats and completions."""

    if TYPE_CHECKING:
        n: int | None
        max_tokens: int | None
        stop: str | list[str] | None
        logit_bias: dict[str, float] | None

    stream_options: StreamOptions | None = None
    repeat_penalty: float | None = Field(
        default=None, gt=0, le=MAX_REPETITION, allow_inf_nan=False, description="another name of repetition_penalty"
    )

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("repeat_penalty") is None:
            return value
        if value.get("repetition_penalty") not in (None, value["repeat_penalty"]):
            raise field_error("repeat_penalty", "is another name of repetition_penalty; give one of them")
        return {**value, "repetition_penalty": value["repeat_penalty"]}

    @field_validator("top_k", mode="before", check_fields=False)
    @classmethod
    def _all_tokens(cls, value: Any) -> Any:
        return 0 if type(value) is int and value == NO_LIMIT else value

    @field_validator("seed", mode="before", check_fields=False)
    @classmethod
    def _random(cls, value: Any) -> Any:
        return None if type(value) is int and value == RANDOM else value

    @field_validator("logit_bias", mode="before", check_fields=False)
    @classmethod
    def _biases_of_tokens(cls, value: Any) -> Any:
        if isinstance(value, dict) and not all(map(_is_bias, value, value.values())):
            raise field_error("", 'must be an object of token ids, such as "70", and numbers from -100 to 100')
        return value

    def _job(self, **values: Any) -> TextJob:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for stop in stops:
            if not stop:
                raise Invalid("stop", "must not be empty")
            check_text("stop", stop, MAX_STOP_CHARACTERS)
        return super()._job(**{"stop": stops or None, "logit_bias": self.logit_bias or None, **values})

    @model_validator(mode="after")
    def _options_of_beams(self) -> TextFields:
        given = self.given
        searches = given.get("use_beam_search") or False
        for name, usual in (_NO_BEAMS if searches else _BEAMS).items():
            value = given.get(name)
            if value and value not in (usual, False) and getattr(value, "type", "") != "text":  # a response_format
                raise field_error(name, _WITH_BEAMS if searches else "needs use_beam_search")
        return self

    @model_validator(mode="after")
    def _options_of_the_end(self) -> TextFields:
        given = self.given
        constrained = given.get("tools") or getattr(given.get("response_format"), "type", "text") != "text"
        for name in ("min_tokens", "ignore_eos"):
            if given.get(name) and constrained:
                raise field_error(name, "does not go with response_format and tools, whose grammars end the answer")
        limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
        if any(0 <= limit < (given.get("min_tokens") or 0) for limit in limits):
            raise field_error("min_tokens", "must be at most max_tokens")
        return self

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> TextFields:
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "is for streams alone; set stream to true")
        return self


_WITH_BEAMS = "does not go with use_beam_search, whose beams are the likeliest as they are"
_BEAMS = {"length_penalty": 1, "early_stopping": False}
_NO_BEAMS = {
    "stream": False, "seed": None, "stop": None, "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0,
    "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": None, "response_format": None,
    "tools": None, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": None,
}  # fmt: skip
"""Fields that beam search is refused with, and the values that ask for nothing."""


def _is_bias(token: Any, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return _TOKEN.fullmatch(token) is not None and number and abs(value) <= MAX_BIAS


def _of_one_kind(value: str | list[Any]) -> str | list[Any]:
    if isinstance(value, str) or _tokens(value):
        return value
    if not all(isinstance(item, str) for item in value) and not all(map(_tokens, value)):
        raise field_error("", "must be a text, texts, token ids, or lists of token ids")
    return value


Prompts = Annotated[
    Words | Annotated[list[Any], Field(min_length=1, max_length=100_000), Tag(LIST)],
    BY_KIND,
    AfterValidator(_of_one_kind),
]
PROMPTS = "a text, texts, a list of token ids, or several of them"


def prompts_of(value: str | list[Any]) -> list[str | list[int]]:
    """The texts or lists of token ids that a field of the type `Prompts` has."""
    return [value] if isinstance(value, str) or _tokens(value) else value


def check_prompts(field: str, prompts: list[str | list[int]]) -> None:
    """Raise `Invalid` for a text that is too long, or has control characters."""
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(field, prompt, MAX_CHARACTERS)


_COMPLETIONS: Any = [
    {"prompt": "A man riding a", "max_tokens": 20},
    {"prompt": "A man riding a horse", "echo": True, "logprobs": 1, "max_tokens": 0},
]


class CompletionFields(TextFields):
    """`POST /v1/completions`."""

    model_config = ConfigDict(title="CompletionRequest", json_schema_extra={"examples": _COMPLETIONS})

    prompt: Prompts = Field(description=PROMPTS)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="of the tokens and the likeliest")
    best_of: int | None = Field(
        default=None, ge=1, le=MAX_CHOICES, description="the width of a beam search, at least n; else n"
    )
    max_tokens: int | None = Field(
        default=None,
        ge=NO_LIMIT,
        description="of the answer, at most; 16 by default; -1: as many as there is room for; 0, only with echo: the "
        "prompt alone",
    )
    echo: bool | None = Field(
        default=None, description="true: texts begin with their prompt, and logprobs are of its tokens too"
    )
    suffix: Literal[""] | None = Field(default=None, description="not offered")

    @model_validator(mode="after")
    def _all_of_them(self) -> CompletionFields:
        searches = self.given.get("use_beam_search")
        if (
            self.best_of is not None
            and (self.best_of < (self.n or 1) or not searches)
            and self.best_of != (self.n or 1)
        ):
            raise field_error("best_of", "must be at least n" if searches else "must be equal to n")
        if searches and self.echo and self.logprobs is not None:
            raise field_error("echo", "with logprobs " + _WITH_BEAMS)
        if self.max_tokens == 0 and not self.echo:
            raise field_error("max_tokens", "must be at least 1 without echo")
        if self.echo and self.logprobs is None and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise field_error("echo", "needs prompts that are texts, or logprobs")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompts_of(self.prompt)

    def job(self) -> TextJob:
        """The job of this request. Raises `Invalid`."""
        check_prompts("prompt", self.prompts)
        limit = _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        most = None if limit == NO_LIMIT else limit
        return self._job(
            prompts=self.prompts, max_tokens=most, logprobs=self.logprobs, echo=self.echo or None, best_of=self.best_of
        )


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
