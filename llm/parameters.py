"""Parameters and results of text generation, with validation. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from contract.bodies import check_bounds
from contract.bounds import MAX_SEED, check_flag, check_number, check_text, check_whole, short
from contract.card import MAX_CHOICES
from contract.errors import CONTEXT_LENGTH, Invalid
from contract.text import (
    MAX_BIAS,
    MAX_BIASED,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    TextJob,
)

MAX_TOP_K = 1 << 20
_NUMBERS = (
    "temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "length_penalty",
)  # fmt: skip

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TextParameters:
    """One continuation of `prompt`, which is token ids.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off; a token is sampled from those that pass all
    three. `repetition_penalty` divides the logits of tokens in prompt and answer (Keskar et al., 2019),
    `presence_penalty` and `frequency_penalty` are OpenAI's, over the answer only. `logprobs` n ≥ 0 requests log
    probabilities of the tokens and of the n most likely, from the model's unmodified logits; None requests none.
    `prompt_logprobs` requests them for the prompt's tokens too, whose cached pages are then computed anew.
    `max_tokens` 0 reads the prompt only. `embed`, with that, requests the pooled hidden states of the prompt.
    `continues`: the text goes on with the prompt's, with a space between them; else it is a text of its own.
    `logit_bias` is OpenAI's: values added to the logits of these tokens; -100 excludes a token, and 100 excludes all
    others. `json_schema` is a schema as text, or "{}" for any JSON. `stop` strings are left out of the text, and so are
    the tokens that end it. `seed` None is random. `beams` n > 0 is a beam search of this width, greedy, whose best
    `answers` are returned; `length_penalty` and `early_stopping` are transformers'. `adapter` names a LoRA.
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
    prompt_logprobs: bool = False  # with `logprobs`
    json_schema: str | None = None
    tool_grammar: str | None = None  # in place of a schema: llguidance's Lark, of llm/grammars/tool_calls.py
    logit_bias: tuple[tuple[int, float], ...] = ()
    continues: bool = False
    embed: bool = False
    beams: int = 0
    answers: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    adapter: str = ""
    ignore_end: bool = False  # go on to max_tokens, or to one of `stop_token_ids`
    min_tokens: int = 0  # before them no token that ends the answer is chosen
    stop_token_ids: tuple[int, ...] = ()  # which end it as the model's own do

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability, and those of the most likely tokens at its place, in descending order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TextDelta(NamedTuple):  # quicker to make than a frozen dataclass: one for each token
    """An iteration's addition: tokens, and the text that is final by now."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A finished continuation. `cached` of its prompt's tokens were found in the KV cache instead of computed.

    `pooled` are the pooled hidden states of its prompt in fp32, if they were requested: `llm.features.pooling` makes
    the embedding of them.
    """

    text: str
    tokens: tuple[int, ...]
    finish: Finish
    prompt_tokens: int
    cached: int = 0
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()  # of the prompt's tokens but the first
    pooled: bytes = b""
    cumulative_logprob: float | None = None  # of a beam search
    alternatives: tuple[GeneratedText, ...] = ()  # and its next best answers


def check(parameters: TextParameters, *, vocabulary: int, context: int) -> None:
    """Raise `Invalid` naming the first invalid field. Text is not echoed."""
    _check_length(parameters, vocabulary, context)
    numbers = {name: getattr(parameters, name) for name in _NUMBERS}
    check_bounds(TextJob, numbers, {"top_k": MAX_TOP_K})
    if parameters.prompt_logprobs and parameters.logprobs is None:
        raise Invalid("prompt_logprobs", "needs logprobs")
    if parameters.logprobs is not None:
        check_whole("logprobs", parameters.logprobs, 0, min(MAX_LOGPROBS, vocabulary))
    _check_bias(parameters.logit_bias, vocabulary)
    _check_stop(parameters.stop)
    _check_end(parameters, vocabulary)
    _check_beams(parameters)
    if parameters.json_schema is not None and not isinstance(parameters.json_schema, str):
        raise Invalid("json_schema", "must be text")


def _check_length(parameters: TextParameters, vocabulary: int, context: int) -> None:
    if not isinstance(parameters.prompt, tuple) or not all(type(token) is int for token in parameters.prompt):
        raise Invalid("prompt", "must be a tuple of token ids")
    if not parameters.prompt:
        raise Invalid("prompt", "must not be empty")
    if not all(0 <= token < vocabulary for token in parameters.prompt):
        raise Invalid("prompt", f"token ids must be between 0 and {vocabulary - 1}")
    check_whole("max_tokens", parameters.max_tokens, 0, MAX_SEED)
    if len(parameters.prompt) + parameters.max_tokens > context:
        field, words = "prompt", f"{len(parameters.prompt)} tokens"
        if len(parameters.prompt) + 1 <= context:  # fewer tokens to come would do
            field, words = "max_tokens", f"{words} of prompt and {short(parameters.max_tokens)} to come"
        raise Invalid(field, f"{words} are more than the model's context of {context}", CONTEXT_LENGTH)


def _check_beams(parameters: TextParameters) -> None:
    check_whole("n", parameters.beams, 0, MAX_CHOICES)
    check_flag("early_stopping", parameters.early_stopping)
    if not parameters.beams:
        return
    check_whole("n", parameters.answers, 1, parameters.beams)
    if not parameters.greedy:
        raise Invalid("temperature", "must be 0 in a beam search")
    names = ("stop", "logit_bias", "json_schema", "tool_grammar", "min_tokens", "stop_token_ids")
    alone = {name: getattr(parameters, name) for name in names}
    alone |= {"prompt_logprobs": parameters.prompt_logprobs, "repetition_penalty": parameters.penalized}
    if field := next((name for name, value in alone.items() if value), None):
        raise Invalid(field, "does not go with a beam search")
    if not parameters.max_tokens:
        raise Invalid("max_tokens", "must be at least 1 in a beam search")


def _check_bias(bias: tuple[tuple[int, float], ...], vocabulary: int) -> None:
    if not isinstance(bias, tuple) or len(bias) > MAX_BIASED:
        raise Invalid("logit_bias", f"must be of at most {MAX_BIASED} tokens")
    for token, value in bias:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
            raise Invalid("logit_bias", f"token ids must be between 0 and {vocabulary - 1}")
        check_number("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    if len({token for token, _ in bias}) < len(bias):
        raise Invalid("logit_bias", "names a token twice")


def _check_end(parameters: TextParameters, vocabulary: int) -> None:
    check_flag("ignore_eos", parameters.ignore_end)
    check_whole("min_tokens", parameters.min_tokens, 0, parameters.max_tokens)
    ids = parameters.stop_token_ids
    if not isinstance(ids, tuple) or len(ids) > MAX_STOP_TOKENS:
        raise Invalid("stop_token_ids", f"must be at most {MAX_STOP_TOKENS} tokens")
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise Invalid("stop_token_ids", f"token ids must be between 0 and {vocabulary - 1}")
    if (parameters.min_tokens or parameters.ignore_end) and (parameters.json_schema or parameters.tool_grammar):
        raise Invalid("min_tokens" if parameters.min_tokens else "ignore_eos", "does not go with a grammar")


def _check_stop(stop: tuple[str, ...]) -> None:
    if not isinstance(stop, tuple) or len(stop) > MAX_STOPS:
        raise Invalid("stop", f"must be at most {MAX_STOPS} texts")
    for text in stop:
        if not isinstance(text, str) or not check_text("stop", text, MAX_STOP_CHARACTERS):
            raise Invalid("stop", "must be text that is not empty")
