"""Weights in prompts: compel's documented syntax, what stays text, what is refused, and work that is linear."""

from __future__ import annotations

import contextlib
import string
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.markup import MAX_DEPTH, MAX_LOWERED, MAX_WEIGHT, MarkupError, WeightedPrompt, read


def parts(text: str) -> list[tuple[str, float]]:
    """Stripped, since neither encoder sees spaces at the ends of words."""
    found = read(text)
    return [(found, 1.0)] if isinstance(found, str) else [(part.strip(), weight) for part, weight in found.parts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a tall thin man picking apricots+", [("a tall thin man picking", 1), ("apricots", 1.1)]),
        ("a man picking (apricots)-", [("a man picking", 1), ("apricots", 0.9)]),
        ("a man (picking apricots)++", [("a man", 1), ("picking apricots", 1.1**2)]),
        ("a man (picking apricots+)++", [("a man", 1), ("picking", 1.1**2), ("apricots", 1.1**3)]),
        ("a man (picking (apricots)1.3)1.1", [("a man", 1), ("picking", 1.1), ("apricots", 1.1 * 1.3)]),
        ("mountain+++ man--", [("mountain", 1.1**3), ("man", 0.9**2)]),
        ("(flames)0.5", [("flames", 0.5)]),
        ("(flames).5", [("flames", 0.5)]),
        ("(flames)0", [("flames", 0)]),
        ("(flames)2 x", [("flames", 2), ("x", 1)]),
        ("fire (flames (trees)1.5)2.0", [("fire", 1), ("flames", 2), ("trees", 3)]),
        ("(pretty flowers)+, the flames", [("pretty flowers", 1.1), (", the flames", 1)]),
        ("cat, dog++, x", [("cat,", 1), ("dog", 1.1**2), (", x", 1)]),
        ("a red ball++. Next", [("a red", 1), ("ball", 1.1**2), (". Next", 1)]),
        ("(a cat)1.3.", [("a cat", 1.3), (".", 1)]),
        ("(a)1.3(b)0.7", [("a", 1.3), ("b", 0.7)]),
        ("(a++)--", [("a", 1.1**2 * 0.9**2)]),
        ("red,(blue)1.3", [("red,", 1), ("blue", 1.3)]),
        ("e-mail++", [("e-mail", 1.1**2)]),
        ("it's++ 🦊--", [("it's", 1.1**2), ("🦊", 0.9**2)]),
        ("dog(s)++ run", [("dog(s)", 1.1**2), ("run", 1)]),
        ("(the dog(s) here)+", [("the dog(s) here", 1.1)]),
        (r"(a \(small\) cat)1.3", [("a (small) cat", 1.3)]),
        (r"C\+\+++ code", [("C++", 1.1**2), ("code", 1)]),
        ("(one)1.2 (two)1.2 three", [("one two", 1.2), ("three", 1)]),
        ("(one)1.2(two)1.2", [("one two", 1.2)]),
    ],
)
def test_what_is_documented_is_read(text: str, expected: list[tuple[str, float]]) -> None:
    found = parts(text)
    assert [part for part, _ in found] == [part for part, _ in expected]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in expected], abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, text) for text in (
            "", "  a  cat\n", "half-baked", "fire+flames", "- a + b --", "++", "the cat--black as night", "C++11", "-x",
            "dog(s)", "f(x) = y", "(open", "close)", ")(", "a badly (formed +test prompt", 'say "hi"', "3 + 4",
            "a\\b", "dog.++", "word+-", "+-+",
        )),
        ("a (cat) here", "a cat here"), ("((a cat))1.0", "a cat"), ("(f/1.8) lens", "f/1.8 lens"), ("(a)) b", "a) b"),
        ("(((a (cat )here", "(((a cat here"), ("(well)-known", "well-known"), ("(a)b", "a b"), ("(a)1.3x", "a 1.3x"),
        ("(v)1.3.4", "v 1.3.4"), ("(a)(b)", "a b"), (r"a \(cat\)", "a (cat)"), (r"C\+\+", "C++"), (r"\\", "\\"),
        ("()+", ""), (r"cat.swap\(dog\)", "cat.swap(dog)"),
    ],
)  # fmt: skip
def test_ordinary_text_stays_text(text: str, expected: str) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('("a cat", "a dog").and()', ".and() is not offered"),
        ('("a cat", "a dog").blend(1, 0.5)', ".blend() is not offered"),
        ("a cat.swap(dog)", ".swap() is not offered"),
        ("flames.attend(0.5)", ".attend() is not offered"),
        ("a cat withLora(me, 0.5)", "withLora() is not offered"),
        ("(a)10.1", "a weight is more than 10"),
        ("((a)5)5", "a weight is more than 10"),
        ("a" + "+" * 25, "a weight is more than 10"),
        ("a" + "+" * 9_999, "a weight is more than 10"),
        ("(a)" + "9" * 5_000, "a weight is more than 10"),
        ("(" * (MAX_DEPTH + 1) + "a" + ")" * (MAX_DEPTH + 1), "nested more than 32 deep"),
        (" ".join(f"({c})0.5 and" for c in string.ascii_letters[: MAX_LOWERED + 1]), "more than 16 parts"),
    ],
    ids=range(12),
)
def test_what_is_not_offered_is_named_and_not_repeated(text: str, said: str) -> None:
    with pytest.raises(MarkupError, match=r"^[^\n]{1,150}$") as caught:
        read(text)
    assert said in str(caught.value) and "cat" not in str(caught.value)


def test_limits_may_be_reached() -> None:
    assert read("(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH) == "a"
    assert parts(f"(a){MAX_WEIGHT}") == [("a", MAX_WEIGHT)]
    assert len(parts(" ".join(f"({c})0.5 and" for c in string.ascii_letters[:MAX_LOWERED]))) == 2 * MAX_LOWERED
    assert parts("a" + "-" * 9_999)[0][1] < 1e-5


@given(st.text(alphabet="ab. ,()+-\\0159\n", max_size=40) | st.text(max_size=20))
def test_every_text_is_read_or_refused(text: str) -> None:
    try:
        found = read(text)
    except MarkupError:
        return
    if isinstance(found, WeightedPrompt):
        assert any(weight != 1 for _, weight in found.parts)
        assert all(0 <= weight <= MAX_WEIGHT and part for part, weight in found.parts)
        neighbours = zip(found.parts, found.parts[1:], strict=False)
        assert all(one[1] != other[1] for one, other in neighbours)
    kept = [c for c in text if c.isalpha()]
    assert [c for c in (found if isinstance(found, str) else found.text) if c.isalpha()] == kept


@given(st.text(max_size=60))
def test_what_is_escaped_comes_back_as_it_was(text: str) -> None:
    escaped = "".join("\\" + c if c in "()+-\\" else c for c in text)
    assert read(escaped) == text


WORD = st.text(string.ascii_lowercase, min_size=1, max_size=5)
WEIGHT = st.sampled_from([0.5, 0.9, 1.1, 1.25, 2.0])
TREE = st.recursive(
    WORD.map(lambda word: (word, [(word, 1.0)])),
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=3), WEIGHT).map(
        lambda drawn: (
            f"({' '.join(text for text, _ in drawn[0])}){drawn[1]}",
            [(word, weight * drawn[1]) for _, words in drawn[0] for word, weight in words],
        )
    ),
    max_leaves=8,
)


@given(st.lists(TREE, min_size=1, max_size=4))
def test_weights_multiply_down_to_every_word(trees: list[tuple[str, list[tuple[str, float]]]]) -> None:
    expected = [leaf for _, leaves in trees for leaf in leaves]
    if max(weight for _, weight in expected) > MAX_WEIGHT - 0.01:
        return
    found = [(word, weight) for part, weight in parts(" ".join(text for text, _ in trees)) for word in part.split()]
    assert [word for word, _ in found] == [word for word, _ in expected]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in expected])


@pytest.mark.parametrize(
    "unit", ["(", ")", "()", "(a ", "a)+ ", "+", "-", "a+ ", "(a)1", "\\(", "1", "(a)1.", "a(", ".swap", "((a)+ "]
)
def test_work_is_in_proportion_to_length(unit: str) -> None:
    """Lines of Python that are run, counted: a parser that goes back would run many times as many."""

    def lines(count: int) -> int:
        ran = 0

        def count_line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal ran
            ran += event == "line"
            return count_line

        before = sys.gettrace()
        sys.settrace(count_line)
        try:
            with contextlib.suppress(MarkupError):
                read(unit * count)
        finally:
            sys.settrace(before)
        return ran

    assert lines(1_600) < 17 * lines(100) + 500
