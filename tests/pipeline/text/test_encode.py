"""Prompts to embeddings: as diffusers encodes them, remembered within bounds, and honest about what was cut."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch

from contract.image import ImageParameters
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

    def __init__(self) -> None:
        super().__init__(model("plain"))
        self.batches: list[list[str]] = []

    def plain(self, prompts: Sequence[str]) -> list[Embedding]:
        self.batches.append(list(prompts))
        return super().plain(prompts)


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
def test_in_a_bucket_bits_do_not_depend_on_companions(bucket: int) -> None:
    clip = CLIPPair(model("plain"))
    alone = {prompt: Encoder(clip).encode([prompt], bucket)[0] for prompt in PROMPTS}
    for order in (PROMPTS, PROMPTS[::-1], PROMPTS[3:] + PROMPTS[:3]):
        for prompt, found in zip(order, Encoder(clip).encode(order, bucket), strict=True):
            assert torch.equal(found.hidden, alone[prompt].hidden) and torch.equal(found.pooled, alone[prompt].pooled)


def test_buckets_are_full_and_remembered_apart() -> None:
    clip = Watched()
    encoder = Encoder(clip)
    for _ in range(2):
        encoder.encode(["a", "b", "c"], bucket=2)
        assert clip.batches == [["a", "b"], ["c", ""]]
    encoder.encode(["a", "c"])
    assert clip.batches[2:] == [["a", "c"]]


def test_what_is_remembered_is_not_encoded_again() -> None:
    clip = Watched()
    encoder = Encoder(clip)
    first = encoder.encode(["a", "b", "a"])
    assert first[0] is first[2] and (encoder.misses, encoder.hits) == (2, 1)
    assert encoder.encode(["b", "c"])[0] is first[1]
    assert clip.batches == [["a", "b"], ["c"]] and (encoder.misses, encoder.hits) == (3, 2)
    assert encoder.encode([]) == []


def test_the_least_recently_used_go_first_and_no_more_are_kept_than_said() -> None:
    encoder = Encoder(Watched(), 3)
    for asked in (["a", "b", "c"], ["a"], ["d"]):
        encoder.encode(asked)
    assert [key[0] for key in encoder._cache] == ["c", "a", "d"]
    (first,) = encoder.encode(["a"])
    many = [str(number) for number in range(8)]  # more at once than are kept
    assert encoder.encode([*many, "a"])[-1] is first, "a known prompt survives newcomers in its own batch"
    encoder.encode(many)
    assert [key[0] for key in encoder._cache] == many[-3:]


def test_what_is_remembered_does_not_keep_its_batch_alive() -> None:
    encoder = Encoder(CLIPPair(model("plain")), capacity=1)
    found = encoder.encode([f"prompt {number}" for number in range(16)])
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in (found[-1].hidden, found[-1].pooled))
    gone = weakref.ref(found[0].hidden)
    del found
    gc.collect()
    assert gone() is None
