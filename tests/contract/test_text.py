"""A request for text becomes a job that its record carries whole, and a version before reads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from contract.card import TextOffer
from contract.chat import ChatFields
from contract.errors import CONTEXT_LENGTH, Invalid
from contract.text import CompletionFields, TextJob
from llm.parameters import TextParameters
from tests.contract.refused import refused

CHAT: dict[str, Any] = {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]}
OFFER = TextOffer(context=256, max_logit_bias=1024)


def test_a_chat_says_what_the_version_before_reads() -> None:
    asked = {"temperature": 0.0, "n": 2, "stop": "x", "logit_bias": {"7": -1.0}, "max_completion_tokens": 9}
    assert ChatFields(**CHAT, **asked, logprobs=True).job().to_dict() == {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], "n": 2,
        "temperature": 0.0, "stop": ["x"], "logit_bias": {"7": -1.0}, "max_tokens": 9, "logprobs": 0,
    }  # fmt: skip
    assert ChatFields(**CHAT).job().to_dict().keys() == {"messages", "n"}


def test_a_completion_says_what_the_version_before_reads() -> None:
    whole = CompletionFields(prompt=["a", "b"], echo=True, seed=3).job()
    assert whole.to_dict() == {"prompts": ["a", "b"], "n": 1, "max_tokens": 16, "seed": 3, "echo": True}
    assert whole.count == 2 and CompletionFields(prompt=[1, 2], n=3).job().tokens == 2


def test_a_record_carries_every_field() -> None:
    job = TextJob(*range(1, 1 + len(dataclasses.fields(TextJob))))  # type: ignore[arg-type]
    assert TextJob.read({**json.loads(json.dumps(job.to_dict())), "newer": 1}) == job
    assert {one.name for one in dataclasses.fields(TextParameters)} - set(TextJob.__slots__) == {
        "prompt", "ignore_end", "prompt_logprobs", "tool_grammar", "continues", "embed", "beams", "answers",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 3, "prompt": ["a"] * 6}, "n"),
        ({"prompt": "a", "max_tokens": 256}, "max_tokens"),
        ({"prompt": "a", "stop": ["b", ""]}, "stop"),
        ({"prompt": "a\0"}, "prompt"),
    ],
)
def test_what_is_not_offered_is_named(fields: dict[str, Any], field: str) -> None:
    with refused(field):
        CompletionFields(**fields).job().check(OFFER)


SHORT = TextOffer(context=10, token_bytes=4, embedding_dimensions=8)
BEFORE = [{"role": "system", "content": "s" * 99}, {"role": "assistant", "content": "a" * 99}]


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (TextJob(prompts=["x" * 36, "y" * 37]), "prompt"),
        (TextJob(prompts=["é" * 19]), "prompt"),
        (TextJob(prompts=["x" * 41], max_tokens=0), "prompt"),
        (TextJob(prompts=[[5] * 10], max_tokens=1), "prompt"),
        (TextJob(messages=[*BEFORE, {"role": "user", "content": "x" * 37}]), "messages"),
        (TextJob(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 19}] * 2}]), "messages"),
        (TextJob(prompts=["x" * 41], embedding="float"), "input"),
        (TextJob(prompts=[[5] * 11], embedding="float"), "input"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_by_its_bytes(job: TextJob, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        job.check(SHORT)
    assert (caught.value.field, caught.value.code) == (field, CONTEXT_LENGTH)


@pytest.mark.parametrize(
    "job",
    [
        TextJob(prompts=["x" * 36, "é" * 18]), TextJob(prompts=["x" * 40], max_tokens=0), TextJob(prompts=[[5] * 9]),
        TextJob(messages=[*BEFORE, {"role": "user", "content": " " * 99 + "x" * 36 + "\n" * 99}]),
        TextJob(prompts=["x" * 40, "y" * 40], embedding="float"),
    ],
)  # fmt: skip
def test_a_prompt_that_may_fit_is_not(job: TextJob) -> None:
    """Templates trim contents and leave out thoughts; without an announced bound anything may fit."""
    job.check(dataclasses.replace(SHORT, max_prompt_logprobs=99))
    TextJob(prompts=["x" * 10**6]).check(TextOffer(context=10))


def test_a_model_that_knows_no_bias_takes_none() -> None:
    job = CompletionFields(prompt="a", logit_bias={"7": 1.0}).job()
    job.check(OFFER)
    with pytest.raises(Invalid, match=r"^logit_bias: "):
        job.check(TextOffer(256))
