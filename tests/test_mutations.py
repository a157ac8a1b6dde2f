"""Tests that mutation operators produce the intended, valid code, and that a run detects unguarded lines."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.mutants import ROOMS, ROOT, all_of
from tests.mutations import lua_mutants, mutants


def changes(source: str) -> set[tuple[str, str]]:
    return {(one.before, one.after) for one in mutants(source)}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("a < b", {("a < b", "(a <= b)"), ("a < b", "(a >= b)")}),
        ("x is None", {("x is None", "(x is not None)")}),
        ("x = not y", {("not y", "(y)")}),
        ("x = a and b", {("a and b", "(a or b)"), ("a and b", "(a)"), ("a and b", "(b)")}),
        ("x = a if b else c", {("a if b else c", "(a)"), ("a if b else c", "(c)")}),
        ("x = a + b", {("a + b", "(a - b)")}),
        ("X = 3", {("3", "(4)"), ("3", "(2)")}),
        ("X = 0.5", {("0.5", "(0.55)"), ("0.5", "(0.45)")}),
        ("X: bool = True", {("True", "False")}),
        ("f(a, b)", {("f(a, b)", "pass"), ("f(a, b)", "(f(b, a))")}),
        ("x = f(a, a)", set()),
        ("x += y", {("x += y", "x -= y"), ("x += y", "pass")}),
        ("x.y = z", {("x.y = z", "pass")}),
        ("raise E", {("raise E", "pass")}),
        ("if a: b = c", {("a", "(not (a))")}),
        ("def f() -> bool:\n    return a", {("return a", "return None"), ("return a", "return True")}),
        ("ä = 'ö'; x = a - b", {("a - b", "(a + b)")}),
    ],
)
def test_operators(source: str, wanted: set[tuple[str, str]]) -> None:
    assert changes(source) == wanted


@pytest.mark.parametrize(
    "source",
    [
        '"""Three words here."""',
        "x: Literal[1] | None",
        "@dataclass(frozen=True)\nclass A: pass",
        "from __future__ import annotations",
        "if TYPE_CHECKING:\n    X = 1",
        "def f(a: Literal[3]) -> Literal[4]: ...",
    ],
)
def test_what_tests_cannot_notice_is_left_alone(source: str) -> None:
    assert changes(source) == set()


def test_lua_is_changed_outside_of_its_strings_and_comments() -> None:
    source = "if x == 1 and y then -- 1 == 2\n  redis.call('SET', 'a == b', x)\nend\nreturn false\n"
    assert {(one.before, one.after) for one in lua_mutants(source)} == {
        ("==", "~="), ("and", "or"), ("1", "2"), ("1", "0"), ("  redis.call('SET', 'a == b', x)", ""),
        ("return false", ""),
    }  # fmt: skip


@pytest.mark.parametrize("room", ROOMS)
def test_every_mutant_of_a_room_compiles_and_is_told_by_its_line(room: str) -> None:
    made = all_of(room)
    assert len(made) > 20 and len({(file, one.source) for file, one in made}) == len(made)
    for file, one in made[:: max(1, len(made) // 20)]:
        if file.endswith(".py"):
            ast.parse(one.source)
        first = one.before.split("\n")[0]
        assert first in (ROOT / file).read_text("utf-8").splitlines()[one.line - 1]
    for test in ROOMS[room]:
        assert (ROOT / test).exists()


def test_a_run_tells_what_is_guarded_from_what_is_not() -> None:
    """The comparison of a token's hash: a test of tokens detects its removal, but not that of scopes below it."""
    source = (ROOT / "core/jobs/keyring.py").read_text("utf-8").splitlines()
    line = next(n for n, text in enumerate(source, 1) if "compare_digest" in text)
    scopes = next(n for n, text in enumerate(source, 1) if n > line and "scopes = " in text)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "core/jobs/keyring.py", "--lines", f"{line}-{scopes}", "--tests",
         "tests/core/jobs/test_keyring.py::test_what_is_no_token_opens_nothing"], cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = ran.stdout.splitlines()
    assert "killed" in next(text for text in told if text.endswith("→ (key is not None)")), ran.stdout
    assert any("LEFT" in text and f"keyring.py:{scopes}: " in text for text in told), ran.stdout
    assert (ROOT / "core/jobs/keyring.py").read_text("utf-8").splitlines() == source, "the tree itself is left alone"
