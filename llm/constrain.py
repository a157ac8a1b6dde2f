"""Constrains an answer to a JSON schema, token by token, with llguidance (the optional extra "text")."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from contract.errors import Invalid
from core.extras import pip_install
from llm.instances import has_finite_instance

_SPACE = r"[ \n]{0,2}"  # between two tokens; without a bound a model may produce it for ever


class GrammarCompiler:
    """Makes matchers for one tokenizer, which llguidance reads once, on first use."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._known: Any = None

    def check(self, schema: str) -> None:
        """Raise `Invalid` for an invalid schema, one that llguidance does not support, or one without instances."""
        try:
            parsed = json.loads(schema)
        except ValueError:
            raise Invalid("json_schema", "is not JSON") from None
        except RecursionError:
            raise Invalid("json_schema", "is nested too deeply") from None
        if not isinstance(parsed, dict):
            raise Invalid("json_schema", "must be an object")
        matcher = self.matcher(schema)
        if not has_finite_instance(parsed):
            raise Invalid(
                "json_schema", "no finite text satisfies it: a $ref leads back to itself through what is required"
            )
        matcher.allowed()

    def matcher(self, schema: str) -> GrammarMatcher:
        """Raises `Invalid` for a schema that cannot be enforced."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise Invalid("json_schema", f"llguidance is not installed here ({pip_install('text')})") from None
        if self._known is None:
            self._known = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends or None
            )
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _SPACE})
            found = llguidance.LLMatcher(self._known, grammar)
        except ValueError as error:
            raise Invalid("json_schema", _first_line(str(error))) from None
        if found.is_error():
            raise Invalid("json_schema", _first_line(found.get_error()))
        return GrammarMatcher(found, self._vocabulary)


class GrammarMatcher:
    """An answer's state in its grammar."""

    def __init__(self, inner: Any, vocabulary: int) -> None:
        self._inner = inner
        self._vocabulary = vocabulary

    def allowed(self) -> Tensor:
        """Which tokens may come next, bool [V]. Raises `Invalid` if there are none and the answer is incomplete."""
        mask = self._inner.compute_bitmask()
        self._check()
        words = torch.frombuffer(bytearray(mask), dtype=torch.int32)
        bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.bool().flatten()[: self._vocabulary]

    def take(self, token: int) -> None:
        """Advance by a token. Raises RuntimeError for one that was not allowed."""
        if not self._inner.consume_token(token):
            raise RuntimeError(f"token {token} does not fit the grammar: {self._inner.get_error()}")

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and nothing can follow. Raises `Invalid` if it is cut off instead."""
        self._check()
        return bool(self._inner.is_stopped())

    def _check(self) -> None:
        """llguidance reports an error, and then offers the end token, where the grammar has no continuation."""
        if self._inner.is_error():
            reason = self._inner.stop_reason()
            raise Invalid("json_schema", f"no token satisfies the schema ({reason})")


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "it cannot be held to")[:200]
