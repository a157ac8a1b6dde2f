"""The state of one text request: its tokens, its position in the KV cache, and the text so far."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llm import sample
from llm.constrain import GrammarMatcher
from llm.detokenizer import Detokenizer
from llm.pages import SequencePages
from llm.parameters import Finish, GeneratedText, Logprob, TextDelta, TextParameters
from llm.pooling import PooledStates, Pooling
from llm.speculate import AcceptanceRate


class PendingTokens:
    """The next tokens of a step that may still run: int64 [L] on the model's device, -1 where logits were not finite.

    Made on the thread that submits to the device.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.known: list[int] | None = None  # once somebody has waited for them
        self._event: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.is_cuda:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[int]:
        if self.known is None:
            if self._event is not None:
                self._event.synchronize()
            self.known = self._tokens.tolist()
        return self.known


class PendingToken(NamedTuple):
    """One of them."""

    step: PendingTokens
    row: int

    @property
    def known(self) -> int:
        """The token; -1 while nobody has waited for it."""
        known = self.step.known
        return -1 if known is None else known[self.row]


class SequenceState:
    """One unfinished answer. `row` is its sequence's row in the cache's table; -1 while it has none."""

    __slots__ = (
        "bias", "cached", "computed", "drafted", "drawn_on_device", "features", "finish", "guesses", "holding", "index",
        "logprobs", "matcher", "output_counts", "own", "pace", "parameters", "pending", "pooled", "pooling", "prompt",
        "prompt_logprobs", "row", "seen", "settings", "tokens", "writer",
    )  # fmt: skip

    def __init__(
        self,
        parameters: TextParameters,
        tokenizer: Any,
        vocabulary: int,
        matcher: GrammarMatcher | None,
        *,
        pooling: Pooling | None = None,
    ) -> None:
        """`pooling` is the model's, of a prompt that is embedded."""
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
        self.matcher = matcher
        self.writer = Detokenizer(tokenizer, parameters.stop, parameters.prompt if parameters.continues else ())
        self.logprobs: list[Logprob] = []
        self.prompt_logprobs: list[Logprob] = []  # of the prompt's tokens from the second on
        self.finish: Finish | None = None
        self.pace = AcceptanceRate()
        self.settings = None if parameters.greedy else _settings(parameters)
        self.bias = _bias(parameters)
        self.seen: Tensor | None = None  # bool [V]: in prompt or answer
        self.output_counts: Tensor | None = None  # int32 [V]: occurrences in the answer
        if parameters.penalized:
            self.seen = torch.zeros(vocabulary, dtype=torch.bool)
            self.seen[self.tokens] = True
            self.output_counts = torch.zeros(vocabulary, dtype=torch.int32)
        # Whether the model's logits and a random number alone decide its next token.
        whole = parameters.greedy or not (parameters.top_k or parameters.top_p < 1 or parameters.min_p)
        self.drawn_on_device = whole and parameters.logprobs is None and not self.modifies_logits

    @property
    def answered(self) -> int:
        """The number of answer tokens."""
        return len(self.tokens) - self.prompt

    @property
    def decoding(self) -> bool:
        """Return whether only the last token is left to process."""
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

    @property
    def modifies_logits(self) -> bool:
        """Return whether the model's logits are modified before a token is chosen. By penalties and grammars, which
        depend on each token in turn, and a bias, which guesses ignore: then there are none.
        """
        return self.seen is not None or self.matcher is not None or self.bias is not None

    def most_guesses(self, limit: int) -> int:
        """The answer's last token needs no guess."""
        return min(limit, self.parameters.max_tokens - self.answered - 1)

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[Logprob], ends: Collection[int]
    ) -> tuple[TextDelta, GeneratedText | None]:
        """Take an iteration's tokens, up to the end of the answer; returns the addition, and the whole text at the
        end.
        """
        text, emitted = "", 0
        for token in tokens:
            emitted += 1
            self.tokens.append(token)
            if self.seen is not None and self.output_counts is not None:
                self.seen[token] = True
                self.output_counts[token] += 1
            if token in ends and not self.parameters.ignore_end:
                self.finish = "stop"
                break
            if self.matcher is not None:
                self.matcher.take(token)
            text += self.writer.add(token)
            if self.writer.ended or (self.matcher is not None and self.matcher.ended):
                self.finish = "stop"
                break
            if self.answered >= self.parameters.max_tokens:
                self.finish = "length"
                break
        if not self.parameters.max_tokens:
            self.finish = "length"
        self.logprobs += logprobs[:emitted]
        if self.finish is not None:
            text += self.writer.finish()
        news = TextDelta(text, tuple(tokens[:emitted]), tuple(logprobs[:emitted]))
        return news, None if self.finish is None else self._whole(self.finish)

    def _whole(self, finish: Finish) -> GeneratedText:
        tokens = tuple(self.tokens[self.prompt :])
        return GeneratedText(
            self.writer.text, tokens, finish, self.prompt, self.cached, tuple(self.logprobs),
            tuple(self.prompt_logprobs), self.pooled.mean().numpy().tobytes() if self.pooled.count else b"",
        )  # fmt: skip


def _bias(parameters: TextParameters) -> sample.LogitBias | None:
    if not parameters.logit_bias:
        return None
    tokens, values = zip(*parameters.logit_bias, strict=True)
    return sample.LogitBias(torch.tensor(tokens), torch.tensor(values, dtype=torch.float32))


def _settings(parameters: TextParameters) -> sample.SamplingSettings:
    seed = secrets.randbits(63) if parameters.seed is None else parameters.seed
    return sample.SamplingSettings(
        temperature=torch.tensor([parameters.temperature]).clamp_min(1e-4),
        top_k=torch.tensor([parameters.top_k]),
        top_p=torch.tensor([parameters.top_p], dtype=torch.float64),
        min_p=torch.tensor([parameters.min_p]),
        seeds=np.array([seed], np.uint64),
    )
