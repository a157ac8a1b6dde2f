"""SDXL's prompts: as diffusers and transformers encode them, with every field and syntax."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from contract import prompts
from contract.markup import WeightedPrompt
from pipeline.families.sdxl.conditioning import CLIPPair
from pipeline.text.chunks import split
from pipeline.text.encode import Embedding, Encoder, MarkedPrompt, PromptFields
from tests.pipeline.long_prompts import chunks, embeddings, words
from tests.pipeline.text.test_weighting import expected
from tests.pipeline.worlds import model, stock

NAMES = ["plain", "many-heads"]
LONG = words(200)


def encode(name: str, **fields: Any) -> list[Embedding]:
    """The embeddings of the negative prompt, if there is one, and of the prompt."""
    encoder = Encoder(CLIPPair(model(name)))
    return encoder.encode(encoder.read(PromptFields(**fields)).prompts)


def close(found: Embedding, hidden: torch.Tensor, pooled: torch.Tensor) -> None:
    torch.testing.assert_close(found.hidden, hidden, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.pooled, pooled, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"prompt_2": "a moor"}, {"negative_prompt_2": "mist"}, {"clip_skip": 1},
        {"prompt_2": "", "negative_prompt_2": ""}, {"clip_skip": 1, "prompt_2": "b", "negative_prompt_2": "c"},
    ],
)  # fmt: skip
def test_short_prompts_are_those_of_diffusers(name: str, fields: dict[str, Any]) -> None:
    given = {"prompt": "a fox", "negative_prompt": "fog", **fields}
    hidden, other, pooled, other_pooled = stock(name).encode_prompt(**given)
    negative, positive = encode(name, **given)
    close(positive, hidden[0], pooled[0])
    close(negative, other[0], other_pooled[0])


@pytest.mark.quick(strength=2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [75, 76, 150, 151, 300])
@pytest.mark.parametrize("second", [None, words(90, 4)])
@pytest.mark.parametrize("skip", [0, 1])
def test_long_prompts_are_their_chunks(name: str, count: int, second: str | None, skip: int) -> None:
    text = words(count)
    least = chunks(name, text, second or "")
    negative, positive = encode(name, prompt=text, negative_prompt="fog", prompt_2=second, clip_skip=skip)
    close(positive, *embeddings(name, (text, second or text), least, skip))
    close(negative, *embeddings(name, ("fog", "fog"), least))
    assert positive.hidden.shape == negative.hidden.shape == (77 * least, 32)


def test_what_fits_is_read_as_plain_text() -> None:
    encoder = Encoder(CLIPPair(model("plain")))
    assert encoder.read(PromptFields("a fox", "fog")) == (("fog", "a fox"), 1)
    assert encoder.read(PromptFields("a fox", "fog", "a fox", "fog")) == (("fog", "a fox"), 1)
    assert encoder.read(PromptFields("a fox", prompt_2="")) == (("a fox",), 1)
    assert encoder.read(PromptFields(words(75), "fog")).chunks == 1


def test_what_is_remembered_is_told_apart_by_every_field() -> None:
    encoder = Encoder(CLIPPair(model("plain")))
    fields = [
        PromptFields("a fox"), PromptFields("a fox", clip_skip=1), PromptFields("a fox", prompt_2="b"),
        PromptFields("a fox", LONG), PromptFields(prompts.read("(a fox:1.2)", "a1111")),
        PromptFields(prompts.read("(a fox)1.2", "compel")), PromptFields(prompts.read("(a fox)1.3", "compel")),
        PromptFields(prompts.read("a BREAK fox", "a1111")),
    ]  # fmt: skip
    for number, one in enumerate(fields):
        positive = encoder.read(one).prompts[-1:]
        (found,) = encoder.encode(positive)
        assert encoder.misses == number + 1
        assert encoder.encode(positive)[0] is found and encoder.misses == number + 1
        assert found.hidden.untyped_storage().nbytes() == found.hidden.nbytes
    encoder.encode(encoder.read(PromptFields("b", LONG)).prompts)
    assert encoder.misses == len(fields) + 2


def weights(name: str, text: str | WeightedPrompt) -> torch.Tensor:
    return split(stock(name).tokenizer, text).weights.flatten()[:, None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("(a:1.3) [b] c", "a b c"),
        (f"{words(70)} (q r s t u v w:0.6) x", f"{words(70)} q r s t u v w x"),
        (f"(({LONG}))", LONG),
        ("a (b:-0.5)", "a b"),
    ],
)
def test_a1111_multiplies_each_tokens_embedding(name: str, text: str, plain: str) -> None:
    read = prompts.read(text, "a1111")
    (found,), (hidden, pooled) = encode(name, prompt=read), embeddings(name, (plain, plain))
    close(found, hidden * weights(name, read), pooled)


@pytest.mark.parametrize("name", NAMES)
def test_break_begins_a_chunk(name: str) -> None:
    (found,) = encode(name, prompt=prompts.read("a fox BREAK (in snow:1.5)", "a1111"))
    (first, pooled), (second, _) = (embeddings(name, (part, part)) for part in ("a fox", "in snow"))
    close(found, torch.cat([first, second * weights(name, prompts.read("(in snow:1.5)", "a1111"))]), pooled)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("filled", [75, 150])
def test_compels_weights_reach_into_every_chunk(name: str, filled: int) -> None:
    """A chunk that is weighted alone, and chunks before it that no weight is in."""
    tail: Sequence[tuple[str, float]] = [("one ", 0.8), ("two ", 1), ("three", 1.6)]
    (found,) = encode(name, prompt=prompts.read(f"{words(filled)} (one)0.8 two (three)1.6", "compel"))
    hidden, pooled = embeddings(name, (words(filled), words(filled)))
    close(found, torch.cat([hidden, torch.tensor(expected(model(name), tail)).float()]), pooled)


@pytest.mark.parametrize(
    ("syntax", "first", "second"), [("compel", "a (b)0.5 c", "(d)1.5 e"), ("a1111", "a (b:0.5) c", "(d:1.5) e")]
)
def test_each_encoder_has_the_weights_of_its_own_prompt(syntax: str, first: str, second: str) -> None:
    one, other = (prompts.read(text, syntax) for text in (first, second))
    (both,) = encode("plain", prompt=one, prompt_2=other)
    (left,), (right,) = (encode("plain", prompt=each) for each in (one, other))
    close(both, torch.cat([left.hidden[:, :16], right.hidden[:, 16:]], dim=1), right.pooled)


def test_bits_of_a_marked_prompt_depend_on_nothing_else() -> None:
    encoder = CLIPPair(model("plain"))
    marked = [MarkedPrompt((LONG, LONG), 3), MarkedPrompt(("a", "b")), MarkedPrompt(("a", "a"), 2, 1)]
    together = Encoder(encoder).encode(["x", *marked, "y"])
    for one, found in zip(marked, together[1:-1], strict=True):
        (alone,) = Encoder(encoder).encode([one], 2)
        assert torch.equal(alone.hidden, found.hidden) and torch.equal(alone.pooled, found.pooled)  # type: ignore[arg-type]


def test_prompts_are_checked_on_one_thread_while_others_are_encoded_on_another() -> None:
    """As the submitting threads and the lane do: a tokenizer's padding and truncation are a state of it."""
    encoder, texts = CLIPPair(model("plain")), [f"a red hat of kind {number}" for number in range(200)]
    expected, stop = encoder.plain(texts[:4]), threading.Event()

    def check() -> None:
        for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            assert encoder.read(PromptFields(f"{texts[number % 200]}, {number}", "")).chunks == 1

    with ThreadPoolExecutor(2) as pool:
        checks = [pool.submit(check) for _ in range(2)]
        try:
            for _ in range(40):
                for one, other in zip(encoder.plain(texts[:4]), expected, strict=True):
                    assert torch.equal(one.hidden, other.hidden)
        finally:
            stop.set()
    for done in checks:
        done.result()
