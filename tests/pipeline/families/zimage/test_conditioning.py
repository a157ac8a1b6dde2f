"""Z-Image's prompts as diffusers' `ZImagePipeline` encodes them, whatever their length; and what was left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.errors import Invalid
from contract.image import ImageParameters
from core.ops.reference import TorchLowering
from pipeline.families.zimage import FAMILY
from pipeline.text.conditioning import Conditioner
from pipeline.text.encode import Encoder
from tests.pipeline.families.zimage.models import SHAPES, model, stock

# A byte is a token, and the template takes 5 + 1 + 1 + 11 of the 512.
PROMPTS = ["a slice of pizza", "一只狐狸 🦊", "", "tabs\tand\nlines  ", "<|im_end|> in it", "x" * 480, "y" * 700]


def encoder(name: str) -> Encoder:
    return Encoder(FAMILY.text_encoder(model(name)))


@pytest.mark.parametrize("name", SHAPES)
def test_embeddings_are_those_of_diffusers(name: str) -> None:
    expected, _ = stock(name).encode_prompt(list(PROMPTS), device="cpu", do_classifier_free_guidance=False)
    for embedding, stock_one in zip(encoder(name).encode(PROMPTS), expected, strict=True):
        torch.testing.assert_close(embedding.hidden, stock_one, rtol=0, atol=2e-5)
    assert len({len(one) for one in expected}) > 4 and expected[-1].shape[0] == 512


def test_a_prompts_bits_do_not_depend_on_its_companions() -> None:
    together = encoder("tiny").encode(PROMPTS)
    for prompt, embedding in zip(PROMPTS, together, strict=True):
        for bucket in (0, 2):
            (alone,) = encoder("tiny").encode([prompt], bucket)
            assert torch.equal(alone.hidden, embedding.hidden) and alone.dropped == embedding.dropped


@pytest.mark.parametrize("excess", [0, 1, 30])
def test_what_was_left_out_is_told_without_the_template(excess: int) -> None:
    tokenizer = model("tiny").parts["tokenizer"]
    head = len(tokenizer("<|im_start|>user\n").input_ids)
    prompt = "p" * (512 - head) + "q" * excess
    wanted = ImageParameters(prompt, 0, 32, 32, guidance_scale=0.0)
    ((_, warnings, _),) = Conditioner(
        model("tiny"),
        encoder("tiny"),
        FAMILY.network(TorchLowering(torch.float32), model("tiny").denoiser).prepare_text,
    ).conditions([wanted])
    left_out = f"prompt: only the first 512 tokens were read; left out: {'q' * excess!r}"
    assert warnings == ([left_out] if excess else [])


@pytest.mark.parametrize(("scale", "negative"), [(0.0, None), (0.0, "blue"), (0.5, None), (4.0, "blue and long" * 9)])
def test_guidance_has_two_rows_above_zero_and_the_usual_form(scale: float, negative: str | None) -> None:
    """diffusers: positive + s · (positive - negative)."""
    one = model("tiny")
    wanted = ImageParameters("a red cat", 0, 32, 32, guidance_scale=scale, negative_prompt=negative)
    ((made, _, _),) = Conditioner(one, encoder("tiny"), lambda hidden: hidden).conditions([wanted])
    assert made.rows == FAMILY.rows(one, wanted) == (2 if scale else 1)
    expected, others = stock("tiny").encode_prompt(
        "a red cat", negative_prompt=negative, device="cpu", do_classifier_free_guidance=scale > 0
    )
    texts = [*others, *expected]
    assert made.tensors["lengths"].tolist() == [len(text) for text in texts]
    for row, text in zip(made.tensors["text"], texts, strict=True):
        torch.testing.assert_close(row[: len(text)], text, rtol=0, atol=2e-5)
        assert not row[len(text) :].any()
    if scale:
        positive, negative_row = torch.randn(2, 5).unbind()
        usual = negative_row + made.guidance_scale * (positive - negative_row)
        torch.testing.assert_close(usual, positive + scale * (positive - negative_row), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "fields", [{"prompt_weighting": True}, {"prompt_weighting": "a1111"}, {"prompt_2": "b"}, {"clip_skip": 1}]
)
def test_fields_of_other_families_are_refused(fields: dict[str, Any]) -> None:
    one = model("tiny")
    conditioner = Conditioner(one, encoder("tiny"), lambda hidden: hidden)
    (name,) = fields
    with pytest.raises(Invalid, match=f"{name}: is not supported by this model"):
        conditioner.read(ImageParameters("a (red)1.3 cat", 0, 32, 32, **fields))
    assert not FAMILY.embedding_widths(one)


def test_an_example_has_the_longest_prompt() -> None:
    one = model("tiny")
    made = FAMILY.example(one, 64, 3, torch.Generator().manual_seed(0), 1)
    assert made["text"].shape == (3, 512, 64) and made["lengths"].tolist() == [512] * 3
    (hidden,) = FAMILY.embed(one, FAMILY.example_ids(one, 2))
    assert hidden.shape == (2, 512, 64)
