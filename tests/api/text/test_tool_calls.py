"""Calls of tools in an answer's text: whole and in any pieces alike, and what is no call is told as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text.events import CallBegin, CallDelta, TextDelta
from api.text.tool_calls import ToolCallParser
from contract.tools import CALLS, HERMES, JSON

Read = tuple[str, list[tuple[str, str]]]


def read(format: str, pieces: list[str], single: bool = False) -> Read:
    """Content and calls, put together from deltas as a client does it."""
    parser = ToolCallParser(CALLS[format], single=single)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.end()
    content, calls = "", []
    for delta in deltas:
        match delta:
            case TextDelta():
                content += delta.text
            case CallBegin():
                assert delta.call == len(calls)
                calls.append((delta.name, ""))
            case CallDelta():
                name, arguments = calls[delta.call]
                calls[delta.call] = (name, arguments + delta.arguments)
    assert parser.calls == len(calls)
    return content, calls


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


NAME = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)
VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=12)
    | st.sampled_from(["</tool_call>", "}", '"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), VALUE, max_size=4)


def written(format: str, name: str, arguments: Any, indent: int | None = None) -> str:
    syntax = CALLS[format]
    return syntax.begin + json.dumps({"name": name, syntax.arguments: arguments}, indent=indent) + syntax.end


@given(st.data(), st.lists(st.tuples(NAME, ARGUMENTS), min_size=1, max_size=3), st.sampled_from([None, 1]))
@pytest.mark.parametrize("format", [HERMES, JSON])
def test_calls_are_read_as_they_were_written(
    format: str, data: st.DataObject, calls: list[tuple[str, Any]], indent: int | None
) -> None:
    text = {HERMES: "\n", JSON: "; "}[format].join(written(format, *call, indent=indent) for call in calls)
    content, made = read(format, data.draw(cut(text)))
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in made] == calls
    assert read(format, data.draw(cut(text)), single=True)[1] == made[:1]


@pytest.mark.parametrize("format", [HERMES, JSON])
def test_many_calls_are_read(format: str) -> None:
    """In portions, which end anywhere."""
    calls = [("f", {"a": number}) for number in range(2_000)]
    text = {HERMES: "\n", JSON: "; "}[format].join(written(format, *call) for call in calls)
    content, made = read(format, [text])
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in made] == calls


PARTS = st.lists(
    st.sampled_from([
        "<tool_call>", "</tool_call>", "<tool", "_call>", '{"name": "f", ', '"arguments": ', '"parameters": ', "{",
        "}", "{}", '{"a": "}"}', "\n", " ", "text", '"', "\\", '{"arguments": {"a": 1}, "name": "g"}', '"x"', "null",
        ";", "[", " " * 520, "x" * 520, '"arguments": "' + "y" * 600 + '"',
        '{"name": "f", "arguments": "' + "z" * 600 + '"}',
        '{"name": "</tool_call>", "arguments": {}}',
    ]), max_size=12,
)  # fmt: skip


@given(st.data(), PARTS, st.booleans())
@pytest.mark.parametrize("format", [HERMES, JSON])
def test_any_text_is_read_alike_in_any_pieces(format: str, data: st.DataObject, parts: list[str], single: bool) -> None:
    text = "".join(parts)
    whole = read(format, [text], single)
    assert read(format, data.draw(cut(text)), single) == whole
    if not whole[1]:
        assert whole[0] == text, "of what is no call nothing is left out"
    if "}" not in text:
        assert [name for name, _ in whole[1]] in ([], ["f"])


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        (HERMES, 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Let me see.",
         [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
        (HERMES, "<tool_call>no call</tool_call> it was", "<tool_call>no call</tool_call> it was", []),
        (HERMES, "if a < b: <tool", "if a < b: <tool", []),
        (HERMES, '<tool_call>{"name": "</tool_call>", "arguments": {}}',
         '<tool_call>{"name": "</tool_call>", "arguments": {}}', []),
        (HERMES, '<tool_call>{"name": "a<b", "arguments": {}}</tool_call>', "", [("a<b", "{}")]),
        (HERMES, "Look:\n <tool_call>no call", "Look:\n <tool_call>no call", []),
        (HERMES, '<tool_call>{"name": "f", "arguments": "' + 600 * "x" + '"}</tool_call>', "", [("f", 600 * "x")]),
        (HERMES, '<tool_call>no <tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>no",
         [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}', "", [("?", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "\\ud800"}', "", [("f", "?")]),
        (JSON, " " * 600 + '{"name": "f", "parameters": {}}', " " * 600 + '{"name": "f", "parameters": {}}', []),
        (JSON, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        (JSON, '{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        (JSON, '{"happy": true}', '{"happy": true}', []),
        (JSON, 'Call {"name": "f", "parameters": {}}', 'Call {"name": "f", "parameters": {}}', []),
        (JSON, "  \n", "  \n", []),
    ],
)  # fmt: skip
def test_what_models_write(format: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(format, [text]) == (content, calls)
    assert read(format, list(text)) == (content, calls)


@pytest.mark.quick
@pytest.mark.parametrize("format", [HERMES, JSON])
@pytest.mark.parametrize(
    ("text", "more"), [
        ('{"name": "f', "ab. "), ('{"arguments": {"', "ab. "), ('{"name": "f", "arguments": {"a": "', "ab. "),
        ("x", "ab. "), ("{", "ab. "), (" ", "ab. "), (" ", "    "),
    ],
)  # fmt: skip
def test_little_of_a_text_without_an_end_is_held_back(format: str, text: str, more: str) -> None:
    """What is held back is read again with each piece."""
    parser = ToolCallParser(CALLS[format])
    parser.feed(CALLS[format].tag + text)
    longest = told = 0
    for _ in range(20_000):
        told += sum(len(getattr(delta, "text", "") + getattr(delta, "arguments", "")) for delta in parser.feed(more))
        longest = max(longest, len(parser._buffer))
    whole = text.startswith('{"arguments"') or (format == HERMES and text in ('{"name": "f', "{", " "))
    assert longest <= (66_000 if whole else 600) and told > 14_000
