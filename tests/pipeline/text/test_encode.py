"""Prompts to embeddings: as diffusers encodes them, remembered within bounds, and honest about what was cut."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from contract.image import ImageParameters
from pipeline.checkpoints.load import ImageModel
from pipeline.families.sdxl.conditioning import CLIPPair
from pipeline.text.encode import Embedding, Encoder
from tests.pipeline.worlds import model, stock

PROMPTS = [
    "a slice of pizza",
    "A PHOTO of a naïve café, 8k",
    "一只狐狸 🦊👩‍👩‍👧",
    "tabs\tand\nlines  and   spaces",
    "(((very:1.4) [odd] {syntax}))",
    "<|endoftext|> in the middle <|startoftext|>",
    "x",
    "",
]


class Watched(CLIPPair):
    """Notes which prompts went through the encoders together."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__(model)
        self.batches: list[list[str]] = []

    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        self.batches.append(list(prompts))
        return super().plain(prompts)


class Counting(Encoder):
    def __init__(self, model: ImageModel, capacity: int = 256) -> None:
        self.watched = Watched(model)
        super().__init__(self.watched, capacity)

    @property
    def batches(self) -> list[list[str]]:
        return self.watched.batches


@pytest.fixture(scope="module")
def plain() -> ImageModel:
    return model("plain")


@pytest.mark.parametrize("shape", ["plain", "two-resnets", "many-heads"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_embeddings_are_those_of_diffusers(shape: str, prompt: str) -> None:
    hidden, _, pooled, _ = stock(shape).encode_prompt(prompt, do_classifier_free_guidance=False)
    (found,) = Encoder(CLIPPair(model(shape))).encode([prompt])
    torch.testing.assert_close(found.hidden, hidden[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found.pooled, pooled[0], rtol=0, atol=1e-6)


def test_an_absent_negative_prompt_is_that_of_diffusers() -> None:
    one = model("plain")
    positive, hidden, pooled, pooled_negative = stock("plain").encode_prompt("a fox", negative_prompt=None)
    wanted = ImageParameters("a fox", 0, one.native, one.native)
    found = Encoder(CLIPPair(one)).encode(["a fox"])
    made = one.family.condition(one, wanted, found, lambda hidden: hidden).tensors
    for own, stock_rows in (("kv", (hidden, positive)), ("pooled", (pooled_negative, pooled))):
        assert torch.equal(made[own][0], stock_rows[0][0])
        torch.testing.assert_close(made[own][1], stock_rows[1][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("bucket", [2, 4])
def test_in_a_bucket_bits_do_not_depend_on_companions(plain: ImageModel, bucket: int) -> None:
    solo = {prompt: Encoder(CLIPPair(plain)).encode([prompt], bucket)[0] for prompt in PROMPTS}
    for order in (PROMPTS, PROMPTS[::-1], PROMPTS[3:] + PROMPTS[:3]):
        for prompt, embedding in zip(order, Encoder(CLIPPair(plain)).encode(order, bucket), strict=True):
            assert torch.equal(embedding.hidden, solo[prompt].hidden)
            assert torch.equal(embedding.pooled, solo[prompt].pooled)


def test_buckets_are_full_and_remembered_apart(plain: ImageModel) -> None:
    encoder = Counting(plain)
    encoder.encode(["a", "b", "c"], bucket=2)
    assert encoder.batches == [["a", "b"], ["c", ""]]
    encoder.encode(["a", "c"], bucket=2)
    assert len(encoder.batches) == 2
    encoder.encode(["a", "c"])
    assert encoder.batches[2:] == [["a", "c"]]


def test_what_is_remembered_is_not_encoded_again(plain: ImageModel) -> None:
    encoder = Counting(plain)
    first = encoder.encode(["a", "b", "a"])
    assert first[0] is first[2] and encoder.batches == [["a", "b"]]
    assert (encoder.misses, encoder.hits) == (2, 1)
    assert encoder.encode(["b", "c"])[0] is first[1]
    assert encoder.batches == [["a", "b"], ["c"]]
    assert (encoder.misses, encoder.hits) == (3, 2)
    assert encoder.encode([]) == []


def test_the_least_recently_used_go_first_and_no_more_are_kept_than_said(plain: ImageModel) -> None:
    encoder = Counting(plain, capacity=3)
    encoder.encode(["a", "b", "c"])
    encoder.encode(["a"])
    encoder.encode(["d"])
    assert [key[0] for key in encoder._cache] == ["c", "a", "d"]
    many = [str(i) for i in range(8)]
    assert len(encoder.encode(many)) == 8  # more at once than are kept
    assert [key[0] for key in encoder._cache] == many[-3:]
    encoder.encode([str(i) for i in range(6)])  # some known, some gone
    assert len(encoder._cache) == 3


def test_a_known_prompt_survives_newcomers_in_its_own_batch(plain: ImageModel) -> None:
    encoder = Counting(plain, capacity=2)
    (first,) = encoder.encode(["a"])
    assert encoder.encode(["b", "c", "d", "a"])[3] is first


def test_what_is_remembered_does_not_keep_its_batch_alive(plain: ImageModel) -> None:
    encoder = Encoder(CLIPPair(plain), capacity=1)
    found = encoder.encode([f"prompt {i}" for i in range(16)])
    kept = found[-1]
    for tensor in (kept.hidden, kept.pooled):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    gone: Any = weakref.ref(found[0].hidden)
    del found
    gc.collect()
    assert gone() is None
