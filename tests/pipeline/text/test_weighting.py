"""Weighted prompts: against a plain computation of the same, without a trace in plain prompts, in whole pictures."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from contract import markup
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.markup import WeightedPrompt
from core.batching.request import Request
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints.load import ImageModel
from pipeline.families.sdxl.conditioning import CLIPPair, embed
from pipeline.families.sdxl.parts import text_encoders, tokenizers
from pipeline.runner import ImageRunner
from pipeline.text.encode import Encoder, MarkedPrompt
from tests.pipeline.worlds import apart, model, solo

Parts = Sequence[tuple[str, float]]
FOX = ImageParameters("a (red)1.4 fox-- in snow", 7, 32, 32, steps=3, prompt_weighting=True)


def read(text: str) -> MarkedPrompt:
    found = markup.read(text)
    assert isinstance(found, WeightedPrompt)
    return MarkedPrompt((found, found))


def states(model: ImageModel, k: int, ids: list[int], hidden: Sequence[int] = ()) -> np.ndarray:
    """[T, D] of one encoder, in fp64; without a look at the tokens at these places, which compel calls masking."""
    mask = torch.ones(1, len(ids), dtype=torch.long)
    mask[0, list(hidden)] = 0
    with torch.inference_mode():
        made = text_encoders(model)[k](torch.tensor([ids]), attention_mask=mask, output_hidden_states=True)
    found: np.ndarray = made.hidden_states[-2][0].double().numpy()
    return found


def expected(model: ImageModel, parts: Parts) -> np.ndarray:
    """compel's arithmetic, token by token, for words that stand apart. No part may be cut."""
    sides = []
    for k, tokenizer in enumerate(tokenizers(model)):
        words = "".join(text for text, _ in parts)
        ids = tokenizer(words, padding="max_length", max_length=77).input_ids
        empty = states(model, k, tokenizer("", padding="max_length", max_length=77).input_ids)
        places: list[list[int]] = []
        at = 1
        for text, _ in parts:
            count = len(tokenizer(text).input_ids) - 2
            places.append(list(range(at, at + count)))
            at += count
        weight = np.ones(77)
        for where, (_, value) in zip(places, parts, strict=True):
            weight[where] = value

        def moved(z: np.ndarray, empty: np.ndarray = empty, weight: np.ndarray = weight) -> np.ndarray:
            return np.asarray(empty + (z - empty) * weight[:, None])

        sums, total = moved(states(model, k, ids)), 1.0
        for where, (_, value) in zip(places, parts, strict=True):
            if value < 1:
                counts = math.tan((1 - max(value, 1e-5)) * math.pi / 2)
                sums, total = sums + counts * moved(states(model, k, ids, where)), total + counts
        sides.append(sums / total)
    return np.concatenate(sides, axis=1)


@pytest.mark.parametrize("shape", ["plain", "many-heads"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a (big red)1.3 dog", [("a ", 1), ("big red ", 1.3), ("dog", 1)]),
        ("a dog--", [("a ", 1), ("dog", 0.81)]),
        ("(a)0.5 b (c)1.6", [("a ", 0.5), ("b ", 1), ("c", 1.6)]),
        ("(one)0.8 two (three)0.7 four", [("one ", 0.8), ("two ", 1), ("three ", 0.7), ("four", 1)]),
        ("(all of it)0.6", [("all of it", 0.6)]),
        ("(none)0 x", [("none ", 0), ("x", 1)]),
        ("naïve (café+ 🦊)1.2", [("naïve ", 1), ("café ", 1.1 * 1.2), ("🦊", 1.2)]),
    ],
)
def test_embeddings_are_those_of_a_plain_computation(shape: str, text: str, parts: Parts) -> None:
    (found,) = Encoder(CLIPPair(model(shape))).encode([read(text)])
    np.testing.assert_allclose(found.hidden.double().numpy(), expected(model(shape), parts), rtol=0, atol=2e-6)
    (words,) = Encoder(CLIPPair(model(shape))).encode(["".join(word for word, _ in parts)])
    torch.testing.assert_close(found.pooled, words.pooled, rtol=0, atol=1e-6)  # of the words, without their marks


def test_bits_depend_on_nothing_but_the_prompt() -> None:
    prompts: list[str | MarkedPrompt] = [read("a (red)1.3 fox"), "a red fox", read("(x)0.5 y--"), "", read("z+")]
    for bucket in (0, 2, 4):
        together = Encoder(CLIPPair(model("plain"))).encode(prompts, bucket)
        for prompt, embedding in zip(prompts, together, strict=True):
            if isinstance(prompt, MarkedPrompt):
                (alone,) = Encoder(CLIPPair(model("plain"))).encode([prompt])
                assert torch.equal(embedding.hidden, alone.hidden) and torch.equal(embedding.pooled, alone.pooled)


def test_what_computes_may_use_its_memory_again() -> None:
    """As a CUDA graph does, which writes where it wrote the last time."""
    plain, prompts = model("plain"), [read("a (red)1.3 fox--"), read("(x)0.5 y+")]
    kept: list[torch.Tensor] = []

    def compute(ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        made = embed(plain, ids)
        kept[:] = kept or [torch.empty_like(one) for one in made]
        for memory, one in zip(kept, made, strict=True):
            memory[: len(one)] = one
        return kept[0][: len(ids[0])], kept[1][: len(ids[0])]

    found = Encoder(CLIPPair(plain, compute)).encode(prompts)
    with torch.inference_mode():
        compute([torch.zeros(2, 77, dtype=torch.long)] * 2)
    for one, prompt in zip(found, prompts, strict=True):
        (expected,) = Encoder(CLIPPair(plain)).encode([prompt])
        assert torch.equal(one.hidden, expected.hidden) and torch.equal(one.pooled, expected.pooled)


@pytest.fixture
def runner() -> ImageRunner:
    return ImageRunner(TorchBackend(model("plain")))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("negative", [None, "", "fog"])
def test_a_plain_prompt_is_drawn_alike_with_weighting_on(
    runner: ImageRunner, deterministic: bool, negative: str | None
) -> None:
    plain = replace(FOX, prompt="a red fox, half-baked", negative_prompt=negative, deterministic=deterministic)
    off = solo(runner, replace(plain, prompt_weighting=False))
    on = solo(ImageRunner(TorchBackend(model("plain"))), plain)
    assert apart(on, off) == 0 and on.fingerprint == off.fingerprint


def test_weights_are_ordinary_text_until_they_are_asked_for(runner: ImageRunner) -> None:
    off = solo(runner, replace(FOX, prompt="a (red fox)", prompt_weighting=False))
    assert apart(off, solo(runner, replace(FOX, prompt="a (red fox)"))) > 0
    assert apart(off, solo(runner, replace(FOX, prompt=r"a \(red fox\)"))) == 0
    marks = "a cat, (x).blend(1) and ((very))"
    assert solo(runner, replace(FOX, prompt=marks, prompt_weighting=False)).image.size == (32, 32)


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_weights_change_the_picture_and_are_in_its_file(runner: ImageRunner, field: str) -> None:
    given = replace(FOX, prompt="a fox", negative_prompt="fog")
    drawn = [
        solo(runner, replace(given, **{field: text}))  # type: ignore[arg-type]
        for text in ("a red fog", "a (red)1.5 fog", "a (red)0.5 fog")
    ]
    assert all(apart(one, other) for one, other in itertools.combinations(drawn, 2))
    told = json.loads(Image.open(io.BytesIO(drawn[1].png())).text["diptych"])  # type: ignore[attr-defined]
    assert told["prompt_weighting"] is True and told[field] == "a (red)1.5 fog"
    assert "prompt_weighting" not in replace(FOX, prompt_weighting=False).to_dict()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "(a).blend(1)"}, "prompt: .blend() is not offered"),
        ({"negative_prompt": "(a, b).and()"}, "negative_prompt: .and() is not offered"),
        ({"prompt_weighting": "comfy"}, "prompt_weighting: must be true or false, or one of compel, a1111"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(runner: ImageRunner, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid, match=f"^{re.escape(said)}"):
        runner.check(Request("r", "image", replace(FOX, **fields)))
