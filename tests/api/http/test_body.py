"""Strict JSON: what is taken equals what json.loads says; what is refused is named and never repeated."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from typing import Any

import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.http import body
from tests.api.world import PATIENCE_S, Api, check_error


def refusal(raw: bytes | str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        body.parse(raw.encode() if isinstance(raw, str) else raw)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [b"", b" \n", b"{", b'{"a":}', b"{'a': 1}", b'{"a": 1,}', b'{"a": 01}', b"{} {}", b"// x", b'{"a": "\xff"}',
     b"\xfe\xff{}", b'{"a": "\xed\xa0\x80"}', "{}".encode("utf-16"), b"\xef\xbb\xbf{}"],
)  # fmt: skip
def test_refuses_what_is_no_json_in_utf8(raw: bytes) -> None:
    assert refusal(raw).code == "invalid_body"


@pytest.mark.parametrize("raw", ["[]", "3", '"text"', "null", "true"])
def test_refuses_a_top_level_that_is_no_object(raw: str) -> None:
    assert "must be a JSON object" in str(refusal(raw))


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 21, "-" + "9" * 5000, "1" + "0" * 1_000_000]
)
@pytest.mark.parametrize(
    ("form", "path"),
    [('{"seed": %s}', "seed"), ('{"a": {"b": [0, {"c": %s}]}}', "a.b[1].c"), ('{"a": [[], [1, %s]]}', "a[1][1]")],
)
def test_refuses_numbers_that_are_none(number: str, form: str, path: str) -> None:
    assert refusal(form % number).param == path


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800", "x\\udfffy", "\\ude00\\ud83d"])
@pytest.mark.parametrize(
    ("form", "path"),
    [
        ('{"prompt": "%s"}', "prompt"),
        ('{"x": {"y": ["%s"]}}', "x.y[0]"),
        ('{"x": {"%s": 1}}', "x"),
        ('{"%s": 1}', None),
    ],
)
def test_refuses_nul_and_lone_surrogates(text: str, form: str, path: str | None) -> None:
    assert refusal(form % text).param == path


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ('{"prompt": "a", "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "\\u0070rompt": "a"}', "prompt"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "a.b"),
        ('{"not plain": 1, "not plain": 1}', None),
    ],
)
def test_refuses_a_name_that_appears_twice(raw: str, path: str | None) -> None:
    error = refusal(raw)
    assert error.param == path and error.code == "repeated_field"


def test_names_the_first_of_two() -> None:
    assert refusal('{"a": NaN, "b": "\\u0000"}').param == "a"
    assert refusal('{"a": "\\u0000", "b": NaN}').param == "a"
    assert refusal('{"a": {"x": [1, NaN]}, "b": NaN}').param == "a.x[1]"


@pytest.mark.parametrize("name", ["has space", "ünïcode", "x" * 65, "", "1st", "a\\nb", "<script>"])
def test_never_repeats_a_name_that_is_not_plain(name: str) -> None:
    for raw, param in (
        (f'{{"{name}": NaN}}', None), (f'{{"a": {{"{name}": [NaN]}}}}', "a"), (f'{{"{name}": {{"a": NaN}}}}', None),
    ):  # fmt: skip
        error = refusal(raw)
        assert error.param == param, "what holds it is named"
        assert name == "" or name not in str(error)


@pytest.mark.parametrize("depth", [body.MAX_DEPTH + 1, 900, 100_000, 500_000])
@pytest.mark.parametrize("pair", ["[]", '{"a":}'])
def test_refuses_deep_nesting(depth: int, pair: str) -> None:
    opening, closing = (pair[:-1], pair[-1])
    raw = '{"a":' + opening * (depth - 1) + "1" + closing * (depth - 1) + "}"
    assert ("nested" if depth < body.MAX_TOKENS else "values") in str(refusal(raw))
    deepest = '{"a":' + "[" * (body.MAX_DEPTH - 1) + "]" * (body.MAX_DEPTH - 1) + "}"
    assert body.parse(deepest.encode()) == json.loads(deepest)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def sound(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return "\x00" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    if isinstance(value, list):
        return all(map(sound, value))
    return not isinstance(value, dict) or all(sound(k) and sound(v) for k, v in value.items())


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4), st.booleans())
def test_takes_exactly_the_sound(value: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if sound(value):
        assert body.parse(raw) == value
    else:
        refusal(raw)


@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_a_refusal(raw: bytes) -> None:
    try:
        assert isinstance(body.parse(raw), dict)
    except ApiError as error:
        assert error.status == 400


def test_very_many_values_in_a_deep_place_take_no_gigabytes() -> None:
    """Paths of very many values in a deep place: kept as words they would fill a machine."""
    name = "n" * 64
    raw = f'{{"{name}":' * 20 + f"[{','.join(['0'] * 49_000)}]" + "}" * 20
    assert len(raw) < body.MAX_BYTES
    assert body.parse(raw.encode())
    assert str(refusal(raw.replace("0]", "NaN]"))).startswith(f"{name}.{name}")


@pytest.mark.parametrize("piece", [b"[]", b'""', b"{}", b"1", b'"\\""', b'{"a":"b"}'])
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch, piece: bytes
) -> None:
    raw = b'{"a": [' + b",".join([piece] * (body.MAX_BYTES // (len(piece) + 1) - 10)) + b"]}"
    monkeypatch.setattr(body.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    assert "more than 50000 values" in str(refusal(raw))


@pytest.mark.parametrize(
    "raw", [b'{"a": "' + b'\\"' * 400_000, b'{"a": "' + b"\\" * 900_001, b"," * 49_000 + b'"' * 900_000]
)
def test_what_is_not_even_json_is_counted_in_one_pass(raw: bytes) -> None:
    """Texts that do not end, of nothing but quotes: none of it is looked at twice."""
    before = time.process_time()
    assert refusal(raw).code == "invalid_body"
    assert time.process_time() - before < 5, "milliseconds; a pass for each quote would take hours"


def test_texts_may_be_long_and_hold_whatever_they_like() -> None:
    text = 'she said "no, [never], {ever}",\n' * 30_000
    assert body.parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    many = {"logit_bias": {str(k): 1 for k in range(5000)}, "ids": list(range(20_000))}
    assert body.parse(json.dumps(many).encode()) == many


def test_large_bodies_are_parsed_beside_the_event_loop(shared: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    parse = body.parse
    monkeypatch.setattr(body, "parse", lambda raw: threads.append(threading.current_thread().name) or parse(raw))
    for count in (3, 300_000):
        check_error(shared.post("/v1/images/generations", prompt=[[]] * count), 400)
    loop, beside = threads
    assert loop != beside


def test_one_tenants_large_bodies_are_parsed_one_at_a_time_and_anothers_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let, under_way = threading.Event(), []
    parse = body.parse

    def held(raw: bytes) -> dict[str, Any]:
        if b"greedy" in raw:
            under_way.append(raw)
            assert let.wait(PATIENCE_S)
        return parse(raw)

    monkeypatch.setattr(body, "parse", held)

    def posted(name: str) -> Request:
        content = json.dumps({"who": name, "prompt": "a" * 100_000}).encode()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)

    async def play() -> None:
        greedy = [asyncio.create_task(body.read(posted("greedy"), "a")) for _ in range(5)]
        while not under_way:
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(body.read(posted("other"), "b"), PATIENCE_S))["who"] == "other"
        assert len(under_way) == 1
        let.set()
        assert len(await asyncio.gather(*greedy)) == 5

    asyncio.run(play())


def test_what_takes_long_to_take_in_leaves_most_of_the_time_to_others() -> None:
    """As on a machine whose processors have other work: its rate is then lower than the highest one."""
    started = time.monotonic()
    asyncio.run(body.take_in("a", b"x", lambda _: time.sleep(0.02)))
    assert time.monotonic() - started >= 7.5 * 0.02
