"""The state of one text request: its tokens, its position in the KV cache, and the text so far."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from contract.text import MAX_BIAS
from llm.cache.pages import SequencePages
from llm.drafts.speculate import AcceptanceRate
from llm.features.adapters import TextAdapter
from llm.features.beam_search import BeamSearch
from llm.features.pooling import PooledStates, Pooling
from llm.grammars.constrain import GrammarMatcher
from llm.parameters import Finish, GeneratedText, Logprob, TextDelta, TextParameters
from llm.sampling import sample
from llm.sampling.pending import PendingToken
from llm.text.detokenizer import Detokenizer


class SequenceState:
    """One unfinished answer. `row` is its sequence's row in the cache's table; -1 while it has none."""

    __slots__ = (
        "__weakref__", "_bias", "_first_bias", "adapter", "beams", "cached", "computed", "drafted", "drawn_on_device",
        "features", "finish", "guessable", "guessed", "guesses", "holding", "index", "logprobs", "matcher",
        "modifies_logits", "own", "pace", "parameters", "pending", "plain", "pooled", "pooling",
        "prompt", "prompt_logprobs", "row", "settings", "tokens", "uses", "writer",
    )  # fmt: skip

    def __init__(
        self,
        parameters: TextParameters,
        tokenizer: Any,
        vocabulary: int,
        matcher: GrammarMatcher | None = None,
        *,
        uses: Sequence[str] = (),
        ends: Collection[int] = (),
        pooling: Pooling | None = None,
        beams: BeamSearch[SequenceState] | None = None,
    ) -> None:
        """`uses` are the names of the features that it was asked for. `ends` are the tokens that end an answer of the
        model. `pooling` is that of a prompt that is embedded. `beams` is the search that this is the prompt of.
        """
        self.uses = uses
        self.beams = beams
        self.adapter: TextAdapter | None = None
        if beams is not None:
            parameters = replace(parameters, logprobs=beams.candidates)
        self.parameters = parameters
        self.pooling = pooling
        self.pooled = PooledStates()
        self.tokens = list(parameters.prompt)
        self.prompt = len(self.tokens)
        self.holding = SequencePages()
        self.row = -1
        self.computed = 0  # tokens whose keys and values are in the cache
        self.drafted = 0  # and in the drafter's
        self.features: Tensor | None = None  # of the positions after these, which the drafter is yet to read
        self.own: Any = None  # what a drafter keeps besides, of the tokens alone
        self.cached = 0
        self.pending: PendingToken | None = None  # the token after `tokens`, which the device may still compute
        self.guesses = 0  # in the next iteration
        self.guessable = False  # whether guesses would pay off, once its next token is known
        self.guessed = 0  # of these, on the device already
        self.matcher = matcher
        self.writer = Detokenizer(
            tokenizer, parameters.stop, parameters.prompt if parameters.continues else (),
            min_tokens=parameters.min_tokens,
        )  # fmt: skip
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: list[Logprob] = []  # of the prompt's tokens from the second on
        self.finish: Finish | None = None
        self.pace: AcceptanceRate | None = None  # of guesses, once there may be any
        self.settings = None if parameters.greedy else _settings(parameters)
        self._bias = _bias(parameters.logit_bias)
        self._first_bias = self._bias  # of the first `min_tokens`
        if parameters.min_tokens:
            excluded = {*parameters.stop_token_ids, *(() if parameters.ignore_end else ends)}
            others = [pair for pair in parameters.logit_bias if pair[0] not in excluded]
            self._first_bias = _bias([*others, *((token, -MAX_BIAS) for token in sorted(excluded))])
        # Whether the model's logits are modified before a token is chosen: by penalties and grammars, which depend on
        # each token in turn, and a bias, which guesses ignore: then there are none.
        biases = [bias for bias in (self._first_bias, self._bias) if bias is not None]
        self.modifies_logits = parameters.penalized or matcher is not None or bool(biases)
        # Whether its tokens are the most likely ones of the model's logits, and nothing else is requested of these.
        self.plain = parameters.greedy and parameters.logprobs is None and not self.modifies_logits
        # Whether the device alone can draw its tokens; one that has none to choose from is told so by the host, which
        # also ranks beams.
        exhausted = any(bias.excludes_all(vocabulary) for bias in biases)
        self.drawn_on_device = matcher is None and beams is None and not exhausted

    def bias(self, position: int) -> sample.LogitBias | None:
        """Return what is added to the logits of the token at this position."""
        return self._first_bias if position < self.prompt + self.parameters.min_tokens else self._bias

    @property
    def answered(self) -> int:
        """The number of answer tokens."""
        return len(self.tokens) - self.prompt

    @property
    def decoding(self) -> bool:
        """Return whether only the last token is left to process: of a beam search that of each beam."""
        if self.beams is not None:
            return any(state.unread == 0 for state in self.beams.states)
        return self.pending is not None or (self.answered > 0 and self.computed >= len(self.tokens) - 1)

    @property
    def complete(self) -> bool:
        """Return whether the pending token is the last one that was asked for: nothing is left to compute."""
        return self.pending is not None and self.answered + 1 >= self.parameters.max_tokens

    @property
    def unread(self) -> int:
        """Tokens to process before the next one can be sampled: all of a prompt, and all but the last of an answer.

        So a preempted answer resumes exactly where it was, with the guesses that it would have had.
        """
        return len(self.tokens) - self.computed - (self.answered > 0)

    @property
    def scored(self) -> range:
        """The positions of the prompt whose logits are yet to give the log probability of the token after them.

        A preempted prompt goes on where it was.
        """
        first, wanted = len(self.prompt_logprobs), self.parameters.prompt_logprobs
        return range(first, self.prompt - 1 if wanted else first)

    @property
    def unpooled(self) -> range:
        """The positions of a prompt that is embedded whose hidden states are yet to be pooled. As `scored`."""
        if self.pooling is None:
            return range(0)
        return range(self.pooling.first(self.prompt) + self.pooled.count, self.prompt)

    @property
    def known_tokens(self) -> list[int]:
        """The tokens whose pages may be cached ones: of those that are scored or pooled none, since they have no
        logits and no hidden states.
        """
        unknown = self.scored or self.unpooled
        return self.tokens[: unknown.start + 1] if unknown else self.tokens

    def fork(self) -> SequenceState:
        """Return a sequence like this one that has nothing in the cache."""
        other = copy.copy(self)
        other.holding, other.row, other.computed, other.drafted = SequencePages(), -1, 0, -1
        other.features, other.own, other.guessed = None, None, 0
        return other

    def most_guesses(self, limit: int) -> int:
        """The answer's last token needs no guess."""
        return min(limit, self.parameters.max_tokens - self.answered - 1)

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[Logprob], ends: Collection[int]
    ) -> tuple[TextDelta, GeneratedText | None]:
        """Take an iteration's tokens, up to the end of the answer; returns the addition, and the whole text at the
        end.
        """
        text, emitted, own, most = "", 0, self.tokens, self.prompt + self.parameters.max_tokens
        for token in tokens:
            emitted += 1
            own.append(token)
            if (token in ends and not self.parameters.ignore_end) or token in self.parameters.stop_token_ids:
                self.finish = "stop"
                break
            if self.matcher is not None:
                self.matcher.take(token)
            text += self.writer.add(token)
            if self.writer.ended or (self.matcher is not None and self.matcher.ended):
                self.finish = "stop"
                break
            if len(own) >= most:
                self.finish = "length"
                break
        if not self.parameters.max_tokens:
            self.finish = "length"
        if logprobs:
            logprobs = logprobs[:emitted]
            self.logprobs += logprobs
        if self.finish is None:
            return TextDelta(text, tuple(tokens), tuple(logprobs)), None
        text += self.writer.finish()
        return TextDelta(text, tuple(tokens[:emitted]), tuple(logprobs)), self._whole(self.finish)

    def _whole(self, finish: Finish) -> GeneratedText:
        tokens = tuple(self.tokens[self.prompt :])
        return GeneratedText(
            self.writer.text, tokens, finish, self.prompt, self.cached, tuple(self.logprobs),
            tuple(self.prompt_logprobs), self.pooled.mean().numpy().tobytes() if self.pooled.count else b"",
        )  # fmt: skip


def _bias(bias: Sequence[tuple[int, float]]) -> sample.LogitBias | None:
    return sample.LogitBias.of(bias) if bias else None


def _settings(parameters: TextParameters) -> sample.RowSettings:
    seed = secrets.randbits(63) if parameters.seed is None else parameters.seed
    return sample.RowSettings(parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p, seed)
