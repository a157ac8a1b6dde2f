"""A grammar is compiled once for all answers of a job, never on the engine's thread, and what it takes is limited."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import Invalid
from contract.json_schema import check_json_schema
from core.batching.engine import Engine
from core.batching.request import Request
from core.batching.runner import Lane
from llm.grammars import constrain, grammar_process
from llm.grammars.constrain import GrammarCompiler
from llm.grammars.grammar_checker import GrammarChecker
from llm.parameters import TextParameters
from llm.runner import TextRunner
from tests.llm import stage
from tests.schemas import AMBIGUOUS, heavy, hostile
from tests.workers.stage import StageRunner
from tests.workers.stage import TextParameters as Drawn

llguidance = pytest.importorskip("llguidance")

# A hundred characters or two: what takes minutes, gigabytes, or the whole stack.
MINUTES = json.dumps({"type": "integer", "allOf": [{"multipleOf": p} for p in (101, 103, 107, 109)]})
GIGABYTES = json.dumps({"type": "object", "minProperties": 1, "additionalProperties": False,
                        "properties": {f"p{i}": {} for i in range(1000)}})  # fmt: skip
STACK = json.dumps({"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1500)} | {"d1500": {}},
                    "$ref": "#/$defs/d0"})  # fmt: skip


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The name of the thread of each compilation in this process."""
    threads: list[str] = []
    real = llguidance.LLMatcher

    class Counted:
        grammar_from_json_schema = staticmethod(real.grammar_from_json_schema)

        def __new__(cls, *given: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return real(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "LLMatcher", Counted)
        yield threads


def test_sixteen_answers_compile_once_and_never_on_the_engines_thread_or_the_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the text and the picture of another tenant; that some of them are preempted changes nothing."""
    model = stage.small()
    wanted = TextParameters(stage.plain(model, "x"), 12, seed=1, json_schema=json.dumps(heavy(1)))
    lane = Lane("lane")
    runner = TextRunner(model, lane=lane, kernels=stage.kernels(), pages=30)
    pictures = StageRunner("picture", lane, 0.001, 4, lambda *_: None)
    with counted(monkeypatch) as threads, Engine([runner, pictures]) as engine:  # type: ignore[list-item]
        futures = [stage.submit(engine, replace(wanted, seed=i), f"a{i}", tenant="a") for i in range(16)]
        others = [
            stage.submit(engine, replace(wanted, json_schema=None), "b", tenant="b"),
            engine.submit(Request("c/1/0", "picture", Drawn("a cat", 4), tenant="b")),
        ]
        answers = [future.result(timeout=300) for future in futures]
        assert all(future.result(timeout=300) for future in others)
    runner.close()
    lane.close()
    assert threads == ["grammar"] and len({answer.text for answer in answers}) > 1
    assert all(answer.text.startswith("{") for answer in answers)


def test_masks_are_computed_beside_the_forward_and_not_on_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """They delayed the steps of all that share the lane."""
    threads: list[str] = []
    unpack = constrain._allowed

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return unpack(*given)

    model = stage.small()
    parameters = TextParameters(stage.plain(model, "x"), 12, seed=1, json_schema=json.dumps(heavy(2)))
    monkeypatch.setattr(constrain, "_allowed", noted)
    assert all(text.tokens for text in stage.write(model, [replace(parameters, seed=i) for i in range(4)]))
    assert len(threads) > 8 and set(threads[1:]) == {"masks_0"}, "the first is the grammar's own"


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="threads have no priorities of their own here")
def test_whatever_compiles_is_behind_the_engine(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward on all processors waits for the slowest of them: a schema takes a tenth of one, in both processes."""
    priorities: list[int] = []
    compile_grammar = constrain.compile_grammar

    def noted(*given: Any) -> Any:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return compile_grammar(*given)

    monkeypatch.setattr(constrain, "compile_grammar", noted)
    compiler.compile(json.dumps({"type": "object", "properties": {"behind": {"type": "null"}}}))
    checker = compiler._checker
    assert checker is not None and checker._process is not None
    priorities.append(os.getpriority(os.PRIO_PROCESS, checker._process.pid))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert priorities == [grammar_process.NICE, min(19, own + grammar_process.NICE)]


def test_a_grammar_is_one_object_while_somebody_needs_it_and_kept_no_longer(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(monkeypatch) as threads:
        first = compiler.compile('{"type": "boolean"}')
        assert compiler.compile('{"type": "boolean"}') is first and len(threads) == 1
        del first
        compiler.compile('{"type": "boolean"}')
        assert len(threads) == 2


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile('{"enum": [true, false]}')
    one, other = grammar.matcher(), grammar.matcher()
    start = one.allowed()
    one.take(int(start.nonzero()[0]))
    assert not bool((one.allowed() == start).all()) and bool((other.allowed() == start).all())


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    model = stage.small()
    checker = GrammarChecker(model.tokenizer.backend_tokenizer.to_str(), model.vocabulary, sorted(model.ends))
    yield checker
    checker.close()


def test_what_takes_too_much_to_compile_is_refused_and_remembered(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a fast processor meets the limit of memory before that of time.
    monkeypatch.setattr(grammar_process, "MEMORY_BYTES", 2**30)
    for schema, words in (
        (MINUTES, "takes more than 1 s to compile"), (GIGABYTES, "to compile"),
        (STACK, "takes too much memory or nesting to compile"), ('{"minItems": "5"}', "Expected positive integer"),
    ):  # fmt: skip
        with pytest.raises(Invalid, match=f"json_schema: .*{words}"):
            checker.check("schema", schema)
        checker.check("schema", '{"type": "object"}')
    checker.close()
    with pytest.raises(Invalid, match="more than 1 s"):
        checker.check("schema", MINUTES)
    assert checker._process is None  # no process was asked again


def test_a_checker_whose_process_is_killed_starts_another(checker: GrammarChecker) -> None:
    checker.check("schema", "{}")
    assert checker._process is not None
    os.kill(checker._process.pid, signal.SIGKILL)
    checker._process.wait()
    checker.check("schema", '{"type": "null"}')


def test_errors_are_one_short_line_of_printable_characters(compiler: GrammarCompiler) -> None:
    with pytest.raises(Invalid) as caught:
        compiler.compile(json.dumps({"type": "string", "pattern": "(" + "\x1b[31m\n" * 100}))
    assert len(caught.value.message) <= 200 and caught.value.message.isprintable()


def test_a_schema_whose_steps_take_too_long_ends_its_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of a step are llguidance's; here they are so low that an object's first name exceeds them."""
    for limit in ("_BURST_S", "_TOKEN_S", "_CHEAP_S"):
        monkeypatch.setattr(constrain, limit, 0.0)
    model = stage.small()
    wanted = TextParameters(stage.plain(model, "x"), 8, seed=1, json_schema='{"type": "object"}')
    with stage.serving(model, kernels=stage.kernels()) as (engine, _):
        held, free = stage.submit(engine, wanted), stage.submit(engine, replace(wanted, json_schema=None), "b")
        with pytest.raises(Invalid, match="json_schema: takes too long at each token"):
            held.result(timeout=300)
        assert free.result(timeout=300).tokens


def test_a_step_beyond_llguidances_limits_is_the_requests_error() -> None:
    """It was an internal error (500), with the grammar in the log."""
    model = stage.small()
    wanted = TextParameters(stage.plain(model, "x"), 60, seed=1, json_schema=json.dumps(AMBIGUOUS))
    with stage.serving(model, kernels=stage.kernels()) as (engine, _):
        futures = [stage.submit(engine, replace(wanted, seed=seed), f"{seed}") for seed in range(4)]
        for future in futures:
            error = future.exception(timeout=300)
            assert error is None or (
                isinstance(error, Invalid) and error.field == "json_schema" and len(str(error)) < 300
            )


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_hostile_schemas_are_compiled_or_refused_by_name(compiler: GrammarCompiler, seed: int) -> None:
    schema = hostile(random.Random(seed))
    try:
        matcher = compiler.compile(check_json_schema(schema)).matcher()
        matcher.take(int(matcher.allowed().nonzero()[0]))
    except Invalid as error:
        assert error.field == "json_schema" and str(error).isprintable() and len(str(error)) <= 250


def test_masks_are_accounted_for_by_tenant_and_cheap_ones_are_never_refused(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile('{"type": "object"}')
    mine, other = grammar.matcher("a"), grammar.matcher("b")
    with pytest.raises(Invalid, match="json_schema: takes too long at each token"):
        mine._budget.charge(1.0)
    called = compiler.compile_lark('%llguidance {}\nstart: %json {"type": "object"}\n').matcher()
    with pytest.raises(Invalid, match="tools: takes too long at each token"):
        called._budget.charge(1.0)
    other._budget.charge(0.1)
    grammar.matcher("a")._budget.charge(0.001)  # the tenant's account is overdrawn, and this answer is not to blame
    with pytest.raises(Invalid):
        grammar.matcher("a")._budget.charge(0.1)
