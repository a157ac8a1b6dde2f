"""Formats of calls by chat template, and grammars that hold answers to calls: what they allow, and what not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.errors import Invalid
from contract.tools import CALLS, HERMES, JSON, OTHER, PLAIN
from llm.grammars.constrain import GrammarCompiler
from llm.grammars.tool_calls import as_texts, call_format, described, tool_grammar
from tests.llm import stage

FUNCTION: dict[str, Any] = {
    "name": "weather", "description": "Tells the weather.",
    "parameters": {
        "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
        "required": ["city"], "$defs": {"City": {"type": "string", "maxLength": 10}},
    },
}  # fmt: skip


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


WEATHER, STRICT, NOW = tool(**FUNCTION), tool(**FUNCTION, strict=True), tool(name="now")
TEMPLATES = {
    "{% for m in messages %}{{ m.content }}{% endfor %}": PLAIN,
    '{{ tools }} <tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <object>}\\n</tool_call>': HERMES,
    '{{ tools }} {"name": function name, "parameters": dictionary of argument name and its value}': JSON,
    "{{ tools }} [TOOL_CALLS]": OTHER,
    "{{ tools }} <tool_call>\\n<function=name> arguments": OTHER,
}


def fits(compiler: GrammarCompiler, text: str, format: str, tools: list[Any], **options: Any) -> bool:
    """Whether an answer may be this text, to its end."""
    grammar = tool_grammar(format, tools, **{"required": False, "parallel": True, **options})
    assert grammar is not None
    matcher, model = compiler.compile_lark(grammar).matcher(), stage.small()
    for token in model.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids:
        if not matcher.allowed()[token]:
            return False
        matcher.take(token)
    return matcher.ended or bool(matcher.allowed()[min(model.ends)])


def written(format: str, name: str, arguments: Any) -> str:
    syntax = CALLS[format]
    return syntax.begin + json.dumps({"name": name, syntax.arguments: arguments}) + syntax.end


PARIS = {"city": "Paris", "days": 2}


@pytest.mark.parametrize("format", [HERMES, JSON, PLAIN])
def test_a_required_call_fits_its_schema(compiler: GrammarCompiler, format: str) -> None:
    def allowed(text: str, **options: Any) -> bool:
        return fits(compiler, text, format, [WEATHER, NOW], required=True, **options)

    paris, now = written(format, "weather", PARIS), written(format, "now", {})
    assert allowed(paris) and allowed(now)
    for arguments in ({"days": 2}, {"city": 5}, {"city": "x" * 11}, {**PARIS, "wind": 1}):
        assert not allowed(written(format, "weather", arguments))
    assert not allowed(written(format, "now", {"city": "x"})) and not allowed(written(format, "then", {}))
    assert not allowed("") and not allowed("It rains.") and not allowed(paris[:-1]) and not allowed(paris + "!")
    assert allowed(f"{paris}\n{now}") == (format == HERMES)
    assert not allowed(f"{paris}\n{now}", parallel=False)


@pytest.mark.parametrize("format", [HERMES, JSON])
def test_calls_of_strict_tools_fit_their_schema_among_text(compiler: GrammarCompiler, format: str) -> None:
    def allowed(text: str, **options: Any) -> bool:
        return fits(compiler, text, format, [STRICT, NOW], **options)

    assert allowed("") and allowed("It rains.\nIt <pours>, 5 < 6.") and allowed(" \n x {}")
    assert allowed(written(format, "weather", PARIS)) and not allowed(written(format, "weather", {"city": 5}))
    assert allowed(written(format, "now", {"anything": [1]})), "which is not strict"
    if format == HERMES:
        assert allowed("Let me see.\n" + written(format, "weather", PARIS) + " " + written(format, "now", {}) + " So.")
        assert not allowed("Let me see. " + written(format, "then", {}))
        assert allowed(written(format, "now", {}) * 2)


@pytest.mark.parametrize("format", [HERMES, JSON])
def test_an_answer_fits_the_schema_of_the_response_or_is_a_call(compiler: GrammarCompiler, format: str) -> None:
    schema = {"properties": {"happy": {"type": "boolean"}}, "required": ["happy"], "additionalProperties": False}
    answer = json.dumps({"type": "object", **schema})
    named = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}})
    for tools in ([WEATHER], [STRICT]):
        assert fits(compiler, '{"happy": true}', format, tools, answer=answer)
        assert fits(compiler, written(format, "weather", PARIS), format, tools, answer=answer)
        assert not fits(compiler, "text", format, tools, answer=answer)
        assert not fits(compiler, "{}", format, tools, answer=answer)
        for text in ('{"name": "Anne"}', '{ "name":"weather"}', written(format, "weather", PARIS)):
            assert fits(compiler, text, format, tools, answer=named)


def test_without_a_strict_tool_any_text_will_do() -> None:
    assert tool_grammar(HERMES, [WEATHER, NOW], required=False, parallel=True) is None


@pytest.mark.parametrize("schema", [{"type": "object", "properties": {"a": {"type": "nothing"}}}, {"pattern": "("}])
def test_a_schema_that_cannot_be_enforced_is_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    function = tool(name="f", parameters={"properties": {"b": schema}})
    grammar = tool_grammar(HERMES, [function], required=True, parallel=True)
    assert grammar is not None
    with pytest.raises(Invalid) as caught:
        compiler.compile_lark(grammar)
    assert not caught.value.message.startswith("at ")


def test_a_schema_without_instances_is_refused() -> None:
    function = tool(name="f", parameters={"properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    with pytest.raises(Invalid, match=r"^tools: no finite"):
        tool_grammar(JSON, [function], required=True, parallel=True)


@pytest.mark.parametrize(("template", "format"), TEMPLATES.items())
def test_the_format_is_read_off_the_template(template: str, format: str) -> None:
    assert call_format(template, ["<|end|>"]) == format
    if format == HERMES:
        assert call_format(template, ["<tool_call>"]) == OTHER, "which answers do not contain"


def test_tools_and_messages_for_templates() -> None:
    assert described([STRICT])[0]["function"].keys() == {"name", "description", "parameters"}
    assert described([NOW])[0]["function"] == {
        "name": "now", "description": "", "parameters": {"type": "object", "properties": {}}
    }  # fmt: skip
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1", "name": "now"},
    ]
    assert as_texts(messages) == [
        {"role": "assistant", "content": 'Well.\n{"name": "now", "parameters": {"a": 1}}'},
        {"role": "user", "content": "noon"},
    ]
