"""Calls of tools for one model: the format in which its template has them, and grammars that hold answers to it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from contract.tools import CALLS, HERMES, JSON, OTHER, PLAIN, TOOLS, arguments_schema
from llm.grammars.grammar_process import SPACE
from llm.grammars.instances import check_schema

_BUILT_IN = "%llguidance {}\n"


def call_format(template: str, controls: Collection[str]) -> str:
    """The format of calls in a chat template, of `contract.tools`. `controls` are tokens that no text has."""
    if "tools" not in template:
        return PLAIN
    if "<tool_call>" in template:
        known = "arguments" in template and "<function=" not in template and "<tool_call>" not in controls
        return HERMES if known else OTHER
    # Llama 3.1's: "Respond in the format {"name": function name, "parameters": dictionary of ...}".
    return JSON if '"parameters": dictionary' in template and "function name" in template else OTHER


def tool_grammar(
    format: str, tools: Sequence[dict[str, Any]], *, required: bool, parallel: bool, answer: str | None = None
) -> str | None:
    """The grammar of an answer with tools, in llguidance's Lark; None if any text will do. Raises `Invalid`.

    `required`: the answer is a call, or several with `parallel`; else it may be text too, or JSON of the schema
    `answer`. Calls of strict tools then fit their schema, and those of others are of any object.
    """
    strict = [bool(tool["function"].get("strict")) for tool in tools]
    if not required and not any(strict) and answer is None:
        return None
    syntax = CALLS[format]
    bodies, rules = [], []
    for k, (tool, is_strict) in enumerate(zip(tools, strict, strict=True)):
        schema = arguments_schema(tool, fitting=required or is_strict)
        check_schema(schema, TOOLS)
        head = [
            "{",
            '"name"',
            ":",
            " ",
            json.dumps(tool["function"]["name"]),
            ",",
            " ",
            f'"{syntax.arguments}"',
            ":",
            " ",
        ]
        if answer is None or syntax.tag:  # else the answer begins alike, and is read by the same lexemes
            head = ["".join(head)]
        words = [syntax.begin[len(syntax.tag) :], *head]
        bodies.append(f"body_{k}")
        rules += [
            f"body_{k}: {' '.join(map(_text, words))} arguments_{k} {_text('}' + syntax.end)}",
            f"arguments_{k}: %json {_json(schema)}",
        ]
    rules.append(f"body: {' | '.join(bodies)}")
    rules.append(f"call: {_text(syntax.tag)} body")
    several = parallel and format == HERMES
    calls = f"call ({_text(chr(10))} call)*" if several else "call"
    if required:
        start = calls
    elif answer is not None:
        rules.append(f"answer: %json {_json(json.loads(answer))}")
        start = f"answer | {calls}"
    elif syntax.tag:
        rules += ["TEXT: /(.|\\n)*/", f"begin[lazy]: TEXT {_text(syntax.tag)}"]
        start = f"(begin body){'*' if several else '?'} TEXT"
    else:
        rules.append("TEXT: /[ \\n]*[^ \\n{](.|\\n)*/")
        start = f"({calls} | TEXT)?"
    return _BUILT_IN + "\n".join([f"start: {start}", *rules]) + "\n"


def described(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools as chat templates read them: those of transformers have a description and parameters in each."""
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    functions = [{**empty, **tool["function"]} for tool in tools]
    return [
        {"type": "function", "function": {name: value for name, value in function.items() if name != "strict"}}
        for function in functions
    ]


def as_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: calls become the assistant's text, and results a user's."""
    syntax = CALLS[PLAIN]
    read = []
    for message in messages:
        calls = [
            json.dumps({"name": call["function"]["name"], syntax.arguments: call["function"]["arguments"]})
            for call in message.get("tool_calls", ())
        ]
        role = "user" if message["role"] == "tool" else message["role"]
        read.append({"role": role, "content": "\n".join(filter(None, [message["content"], *calls]))})
    return read


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def _json(schema: dict[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACE}})
