"""What text is asked for with, what comes back, and what is refused.

Knows the limits of values; knows nothing of weights, devices or HTTP, and imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from core.batching.runner import Refused
from core.text import complaint

MAX_STOPS = 4  # as in OpenAI's API
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_TOP_K = 1 << 20
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_REPETITION = 10.0
MAX_BIAS = 100.0
MAX_BIASED = 1024  # tokens of one request
MAX_SEED = 2**63 - 1
MAX_SCHEMA_CHARACTERS = 65_536

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TextParameters:
    """One continuation of `prompt`, which is token ids.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 leave all tokens in; of those that are left in by all
    three one is drawn. `repetition_penalty` divides the logits of what prompt and answer hold (Keskar et al., 2019),
    `presence_penalty` and `frequency_penalty` are OpenAI's, over the answer alone. `logprobs` n ≥ 0 asks for the log
    probabilities of the tokens and of the n likeliest, as the model gives them, before any of the above; None asks for
    none. `logit_bias` is OpenAI's: to the logits of these tokens these values are added, of which -100 leaves a token
    out and 100 leaves all others out.
    `json_schema` is a schema as text, or "{}" for any JSON. `stop` is left out of the text, and so are the tokens
    that end it. `seed` None is any.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    json_schema: str | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_end: bool = False  # go on to max_tokens: for benchmarks

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability, and those of the likeliest tokens at its place, the likeliest first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What an iteration added: tokens, and the text that is certain by now."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A finished continuation. `cached` of its prompt's tokens were found instead of computed."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish
    prompt_tokens: int
    cached: int = 0
    logprobs: tuple[Logprob, ...] = ()


def check(wanted: TextParameters, *, vocabulary: int, context: int) -> None:
    """Raise `Refused` naming the first field that is wrong. Text is not echoed."""
    if not isinstance(wanted.prompt, tuple) or not all(type(token) is int for token in wanted.prompt):
        raise Refused("prompt: must be a tuple of token ids")
    if not wanted.prompt:
        raise Refused("prompt: must not be empty")
    if not all(0 <= token < vocabulary for token in wanted.prompt):
        raise Refused(f"prompt: token ids must be between 0 and {vocabulary - 1}")
    _whole("max_tokens", wanted.max_tokens, 1, MAX_SEED)
    if len(wanted.prompt) + wanted.max_tokens > context:
        raise Refused(
            f"max_tokens: {len(wanted.prompt)} tokens of prompt and {_short(wanted.max_tokens)} to come are more than "
            f"the model's context of {context}"
        )
    _number("temperature", wanted.temperature, 0, MAX_TEMPERATURE)
    _number("top_p", wanted.top_p, 0, 1)
    if wanted.top_p == 0:
        raise Refused("top_p: must be more than 0")
    _number("min_p", wanted.min_p, 0, 1)
    _whole("top_k", wanted.top_k, 0, MAX_TOP_K)
    _number("repetition_penalty", wanted.repetition_penalty, 0, MAX_REPETITION)
    if wanted.repetition_penalty == 0:
        raise Refused("repetition_penalty: must be more than 0")
    _number("presence_penalty", wanted.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _number("frequency_penalty", wanted.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if wanted.seed is not None:
        _whole("seed", wanted.seed, 0, MAX_SEED)
    if wanted.logprobs is not None:
        _whole("logprobs", wanted.logprobs, 0, min(MAX_LOGPROBS, vocabulary))
    _check_bias(wanted.logit_bias, vocabulary)
    if not isinstance(wanted.stop, tuple) or len(wanted.stop) > MAX_STOPS:
        raise Refused(f"stop: must be at most {MAX_STOPS} texts")
    for text in wanted.stop:
        wrong = "must be text that is not empty"
        if isinstance(text, str) and text:
            wrong = complaint(text, MAX_STOP_CHARACTERS) or ""
        if wrong:
            raise Refused(f"stop: {wrong}")
    if wanted.json_schema is not None and not isinstance(wanted.json_schema, str):
        raise Refused("json_schema: must be text")
    if wanted.json_schema is not None and len(wanted.json_schema) > MAX_SCHEMA_CHARACTERS:
        raise Refused(f"json_schema: must have at most {MAX_SCHEMA_CHARACTERS} characters")


def _check_bias(bias: tuple[tuple[int, float], ...], vocabulary: int) -> None:
    if not isinstance(bias, tuple) or len(bias) > MAX_BIASED:
        raise Refused(f"logit_bias: must be of at most {MAX_BIASED} tokens")
    for token, value in bias:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise Refused(f"logit_bias: token ids must be between 0 and {vocabulary - 1}")
        _number("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    if len({token for token, _ in bias}) < len(bias):
        raise Refused("logit_bias: names a token twice")


def _whole(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{field}: must be a whole number")
    if not low <= value <= high:
        raise Refused(f"{field}: must be between {low} and {high}, not {_short(value)}")


def _number(field: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(f"{field}: must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(f"{field}: must be a finite number")
    if not low <= value <= high:
        raise Refused(f"{field}: must be between {low:g} and {high:g}, not {_short(value)}")


def _short(value: float) -> str:
    """An integer may have a million digits."""
    return f"{value:g}" if isinstance(value, float) else str(value) if abs(value) < 10**20 else "that"
