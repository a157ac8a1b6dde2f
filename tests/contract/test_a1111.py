"""The web UI's prompt syntax: its own documented examples, and what holds for any text."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import a1111, markup, prompts
from contract.markup import A1111, MAX_DEPTH, MAX_WEIGHT, MarkupError, WeightedPrompt

MARKS = "()[]\\:"
PLAIN = st.text(st.characters(exclude_characters=MARKS + "<", exclude_categories=["Cs"])).filter(
    lambda text: "BREAK" not in text
)
SYNTAX = st.lists(st.sampled_from([*MARKS, "a", " ", "BREAK", ":1.2)", ":-2)", ":.5)", "((", "é", "{a|b}", "__c__"]))


@pytest.mark.parametrize(
    ("text", "parts"),
    [  # of `parse_prompt_attention`'s documentation
        ("an (important) word", [("an ", 1.0), ("important", 1.1), (" word", 1.0)]),
        ("(unbalanced", [("unbalanced", 1.1)]),
        ("(unnecessary)(parens)", [("unnecessaryparens", 1.1)]),
        (
            "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).",
            [
                ("a ", 1.0), ("house", 1.573), (" ", 1.1), ("on", 1.0), (" a ", 1.1), ("hill", 0.55),
                (", sun, ", 1.1), ("sky", 1.4641), (".", 1.1),
            ],
        ),
        ("[word]", [("word", 1 / 1.1)]),
        ("((a:1.5) b:0.5)", [("a", 0.75), (" b", 0.5)]),
        ("(a:-1)", [("a", -1.0)]),
        ("(a: 1.2 ) b", [("a", 1.2), (" b", 1.0)]),
        (r"(\(a\):1.2)", [("(a)", 1.2)]),
        ("(embedding:ink:1.2)", [("embedding:ink", 1.2)]),
    ],
)  # fmt: skip
def test_examples(text: str, parts: list[tuple[str, float]]) -> None:
    found = a1111.read(text)
    assert isinstance(found, WeightedPrompt) and found.syntax == A1111
    assert [word for word, _ in found.parts] == [word for word, _ in parts]
    assert [weight for _, weight in found.parts] == pytest.approx([weight for _, weight in parts])


@pytest.mark.parametrize("text", ["a b:1.2) c", "a] b)", "note: this", "{a|b} __color__", r"c:\d", "BREAKING", ""])
def test_what_is_no_markup_stays(text: str) -> None:
    assert a1111.read(text) == text


@pytest.mark.parametrize(
    ("text", "parts", "breaks"),
    [
        ("a BREAK b", [("a", 1.0), ("b", 1.0)], (1,)),
        ("a BREAK\nBREAK b", [("a", 1.0), ("b", 1.0)], (1, 1)),
        ("BREAK a BREAK", [("a", 1.0)], (0, 1)),
        ("(a BREAK b:1.2) c", [("a", 1.2), ("b", 1.2), (" c", 1.0)], (1,)),
    ],
)
def test_breaks(text: str, parts: list[tuple[str, float]], breaks: tuple[int, ...]) -> None:
    assert a1111.read(text) == WeightedPrompt(tuple(parts), A1111, breaks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a:b:0.5]", "prompt editing"), ("[a|b]", "prompt editing"), ("<lora:ink:0.8> a", "the field lora"),
        ("(" * (MAX_DEPTH + 1), "nested"), ("(a:11)", "more than 10"), ("(a:-11)", "more than 10"),
        ("((a:9):9)", "more than 10"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_refused(text: str, said: str) -> None:
    with pytest.raises(MarkupError, match=said):
        a1111.read(text)


@given(PLAIN)
def test_plain_text_is_unchanged_in_every_syntax(text: str) -> None:
    assert prompts.read(text, False) == text
    assert prompts.read(text, A1111) == text


@given(PLAIN)
def test_escaped_marks_are_text(text: str) -> None:
    whole = f"(({text}]:["
    assert a1111.read(re.sub(r"([()\[\]\\])", r"\\\1", whole)) == whole


@given(PLAIN.filter(bool), st.lists(st.floats(0.3, 1.4).map(lambda x: round(x, 3)), min_size=1, max_size=5))
def test_weights_multiply(text: str, weights: list[float]) -> None:
    marked = text
    for weight in weights:
        marked = f"({marked}:{weight})"
    found = a1111.read(marked)
    product = math.prod(weights)
    if isinstance(found, str):
        assert found == text and product == pytest.approx(1)
    else:
        ((words, weight),) = found.parts
        assert words == text and weight == pytest.approx(product)


@given(SYNTAX.map("".join))
def test_nothing_crashes_and_weights_are_bounded(text: str) -> None:
    for syntax in (True, *prompts.SYNTAXES):
        try:
            found = prompts.read(text, syntax)
        except MarkupError:
            continue
        if isinstance(found, WeightedPrompt):
            assert all(abs(weight) <= MAX_WEIGHT for _, weight in found.parts)
            assert list(found.breaks) == sorted(found.breaks) and all(0 <= n <= len(found.parts) for n in found.breaks)


@pytest.mark.parametrize(
    "text", ["(a)" * 3300, "(a:1.1)" * 1400, "((((a))))[b]" * 800, ")" * 300_000, ":" * 10_000, " " * 10_000]
)
def test_long_texts_are_read_in_linear_time(text: str) -> None:
    """In no time, or in hours."""
    found = a1111.read(text)
    assert found == text or isinstance(found, WeightedPrompt)


def test_more_breaks_than_chunks_are_refused() -> None:
    assert isinstance(a1111.read("a BREAK b BREAK c BREAK d"), WeightedPrompt)
    with pytest.raises(MarkupError, match="has more than 3 BREAKs, and at most 4 chunks are read"):
        a1111.read("BREAK " * 1600)


def test_true_is_compels_syntax() -> None:
    text = "a (red)1.3 fox"
    assert prompts.read(text, True) == prompts.read(text, markup.COMPEL) == markup.read(text) != text
