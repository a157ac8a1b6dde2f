"""Constrains an answer to a JSON schema, token by token, with llguidance (the optional extra "text").

A schema is compiled once for all answers of a job, on the thread that submits them: after contract/json_schema.py has
found it within its bounds, and a process with limits of time and memory (grammar_checker.py) has compiled it before.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from contract.errors import Invalid
from contract.json_schema import FIELD, check_json_schema
from contract.tools import TOOLS
from core.extras import pip_install
from core.threads import lower_priority
from llm.grammars.grammar_checker import GrammarChecker, TurnsByTenant
from llm.grammars.grammar_process import LARK, NICE, SCHEMA, STACK_BYTES, compile_grammar, first_line, make_tokenizer
from llm.grammars.instances import check_schema

# Seconds of CPU for the masks of a tenant's answers with one grammar: at once, per token, and of a mask never refused.
_BURST_S, _TOKEN_S, _CHEAP_S = 0.5, 0.001, 0.004
_FIRST_S, _NEWS = 0.0005, 0.1  # expected of a mask before any was computed, and the weight of each that was


_STACK_LOCK = threading.Lock()
T = TypeVar("T")


class GrammarCompiler:
    """Compiles schemas for one tokenizer, which llguidance reads once, on first use. Thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._known: Any = None
        self._checker: GrammarChecker | None = None
        self._turns = TurnsByTenant()
        self._compiled: weakref.WeakValueDictionary[tuple[str, str], Grammar] = weakref.WeakValueDictionary()

    def compile(self, schema: str, tenant: str = "") -> Grammar:
        """The grammar of a schema: the same object for all that need it at once.

        Raises `Invalid` for an invalid schema, one that llguidance does not support or that takes too much to compile,
        and one without instances.
        """
        return self._compiled.get((SCHEMA, schema)) or self._of(SCHEMA, schema, _checked(schema), tenant)

    def compile_lark(self, text: str, tenant: str = "") -> Grammar:
        """The same of a grammar that is built here, in llguidance's Lark, of schemas that `check_schema` accepts."""
        return self._compiled.get((LARK, text)) or self._of(LARK, text, text, tenant)

    def _of(self, kind: str, source: str, text: str, tenant: str) -> Grammar:
        with self._turns.turn(tenant):
            grammar = self._compiled.get((kind, source))
            if grammar is None:
                self._compiled[kind, source] = grammar = self._compile(kind, text)
            return grammar

    def close(self) -> None:
        """End the process that checks schemas."""
        if self._checker is not None:
            self._checker.close()

    def _compile(self, kind: str, text: str) -> Grammar:
        if self._known is None or self._checker is None:
            self._read_tokenizer()
        assert self._checker is not None
        self._checker.check(kind, text)
        try:
            matcher, mask = _on_stack(lambda: compile_grammar(self._known, kind, text))
        except ValueError as error:
            raise Invalid(FIELD, first_line(str(error)) or "cannot be enforced") from None
        return Grammar(matcher, _allowed(mask, self._vocabulary), FIELD if kind == SCHEMA else TOOLS)

    def _read_tokenizer(self) -> None:
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        text = backend.to_str()
        try:
            self._known = make_tokenizer(text, self._vocabulary, self._ends)
        except ImportError:
            raise Invalid(FIELD, f"llguidance is not installed here ({pip_install('text')})") from None
        self._checker = GrammarChecker(text, self._vocabulary, self._ends)


class Grammar:
    """A compiled schema: makes an answer's matcher by copying."""

    def __init__(self, matcher: Any, first: Tensor, field: str) -> None:
        """`field` is what errors name."""
        self._matcher = matcher
        self._field = field
        self.first = first  # bool [V]: which tokens an answer may begin with
        self._lock = threading.Lock()
        self._budgets: weakref.WeakValueDictionary[str, _MaskBudget] = weakref.WeakValueDictionary()

    def matcher(self, tenant: str = "") -> GrammarMatcher:
        """A matcher at the beginning of one of the tenant's answers. Takes microseconds."""
        with self._lock:
            budget = self._budgets.get(tenant)
            if budget is None:
                self._budgets[tenant] = budget = _MaskBudget(self._field)
            return GrammarMatcher(self.first, self._matcher.deep_copy(), budget, self._field)


class _MaskBudget:
    """Limits what the masks of one tenant's answers with one grammar take: they delay all others' steps."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._lock = threading.Lock()
        self._left_s = _BURST_S
        self.expected_s = _FIRST_S  # of the next mask

    def charge(self, seconds: float) -> None:
        """Account for a token's mask. Raises `Invalid` if masks took too long by now, and this one is not cheap."""
        with self._lock:
            self.expected_s += _NEWS * (seconds - self.expected_s)
            self._left_s = min(_BURST_S, self._left_s + _TOKEN_S) - seconds
            if self._left_s < 0 and seconds > _CHEAP_S:
                raise Invalid(self._field, "takes too long at each token: use fewer alternatives or simpler patterns")


class GrammarMatcher:
    """An answer's state in its grammar."""

    def __init__(self, first: Tensor, inner: Any, budget: _MaskBudget, field: str) -> None:
        self._field = field
        self._first = first
        self._inner = inner
        self._budget = budget
        self._next: Tensor | Invalid | None = first  # what `allowed` returns or raises; None: not computed yet
        self.turn = 0  # the iteration that computed its last mask

    @property
    def ready(self) -> bool:
        """Return whether its next mask is computed."""
        return self._next is not None

    @property
    def expected_s(self) -> float:
        """Seconds of the CPU that its next mask is expected to take, by those of the tenant's answers."""
        return self._budget.expected_s

    def compute(self) -> None:
        """Compute what `allowed` returns, unless that is done. On any thread, between two calls of other methods."""
        if self._next is None:
            try:
                started = time.thread_time()
                mask = self._inner.compute_bitmask()
                self._check()
                self._budget.charge(time.thread_time() - started)
                self._next = _allowed(mask, len(self._first))
            except Invalid as error:
                self._next = error

    def allowed(self) -> Tensor:
        """The mask of tokens that may come next, bool [V]. Raises `Invalid` if there are none and the answer is
        incomplete.
        """
        self.compute()
        if isinstance(self._next, Invalid):
            raise self._next
        assert self._next is not None
        return self._next

    def take(self, token: int) -> None:
        """Advance by an allowed token. Raises `Invalid` if that takes more than a step may."""
        self._next = None
        if not self._inner.consume_token(token):
            self._check()
            raise RuntimeError(f"token {token} does not fit the grammar")

    @property
    def ended(self) -> bool:
        """Return whether the answer is complete and nothing can follow. Raises `Invalid` if it is cut off instead."""
        self._check()
        return bool(self._inner.is_stopped())

    def _check(self) -> None:
        """llguidance reports an error, and then offers the end token, where the grammar has no continuation."""
        if self._inner.is_error():
            raise Invalid(self._field, f"no token satisfies the schema ({first_line(self._inner.get_error())})")


def _on_stack(function: Callable[[], T]) -> T:
    """Call a function on a thread with four times the stack that grammar_process.py allows it, and its priority."""
    outcome: Future[T] = Future()

    def run() -> None:
        lower_priority("compiling a grammar", nicer=NICE)
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    with _STACK_LOCK:  # the size is the process's
        before = threading.stack_size(4 * STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return outcome.result()


def _checked(schema: str) -> str:
    """The schema as compact JSON. Raises `Invalid` for one that is no object, beyond its bounds, or that no finite text
    satisfies.
    """
    try:
        parsed = json.loads(schema, parse_constant=_no_constant)
    except ValueError:
        raise Invalid(FIELD, "is not JSON") from None
    except RecursionError:
        raise Invalid(FIELD, "is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise Invalid(FIELD, "must be an object")
    text = check_json_schema(parsed)
    check_schema(parsed, FIELD)
    return text


def _no_constant(name: str) -> Any:
    """Raises ValueError: NaN and infinities are no JSON."""
    raise ValueError(name)


def _allowed(mask: bytes, vocabulary: int) -> Tensor:
    """bool [V] of a mask's bits."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocabulary, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))
