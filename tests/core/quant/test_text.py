"""The text side: the same verb quantizes a Llama, whose perplexity on captions rises by less than one percent."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch

from core.quant.convert import Recipe, Rule, quantize_
from core.quant.linear import Int8Linear
from core.quant.statistics import Statistics
from tests.core.quant.stage import ROOT

MODEL = ROOT / "models" / "emoji-lm"
CAPTIONS = """
A man riding a brown horse along the beach at sunset.|A group of people standing around a kitchen table.
A black cat is sleeping on top of a wooden chair.|Two dogs play with a red ball in the park.
A plate of food with rice, meat and green vegetables.|A woman holding an umbrella walks down a wet street.
A large white airplane sitting on the runway.|Several boats are tied to a dock near the shore.
A little boy in a blue shirt is eating a slice of pizza.|A bathroom with a white sink, a toilet and a mirror.
A train is pulling into the station on a cloudy day.|Three zebras graze in a field of tall grass.
A skateboarder jumps over a set of stairs.|A vase filled with yellow flowers on a table.
A city bus drives past a tall brick building.|A person on skis goes down a snowy hill.
A laptop computer and a cup of coffee on a desk.|An elephant walks through the water with its baby.
A tennis player swings her racket at the ball.|A bedroom with a large bed and two small lamps.
A bunch of ripe bananas hanging from a tree.|A motorcycle parked on the side of the road.
A giraffe stretches its neck to eat leaves.|A young girl flies a kite on a sunny day.
A stop sign stands at the corner of an empty street.|A baseball player is about to hit the ball.
Two men in suits cut a cake together.|A living room with a couch, a television and a fireplace.
A bird sits on a branch above the river.|A surfer rides a big wave in the ocean.
A bowl of soup next to a piece of bread.|An old clock tower rises above the town.
A sheep and her lamb stand in a green meadow.|A child brushes his teeth in front of a mirror.
A red truck carries wood down a dirt road.|A woman takes a picture of her lunch with a phone.
A brown bear wades in a shallow stream.|Four friends sit on a bench and look at the sea.
A chocolate cake with candles on a glass plate.|A fire hydrant covered with snow.
A man in a hat reads a newspaper on the train.|A kitchen with wooden cabinets and a silver stove.
A teddy bear lies on a pillow.|A traffic light hangs over a busy street at night.
A cow looks over a fence at the camera.|A boy throws a frisbee to his dog.
A pair of scissors and some paper on the floor.|People wait with their luggage at the airport.
A glass of orange juice beside a plate of eggs.|A wooden bench in a garden full of roses.
"""
# What calibration reads is none of what is measured.
READ = (
    "A dog on a sofa.",
    "Many people walk across a bridge in the rain.",
    "A table with cups, plates and a lamp on it.",
    "A small boat on a quiet lake below the mountains.",
    "A woman and a man ride bicycles down the street.",
    "cat face | animal, cat, pet",
    "red heart on a blue background",
    "A white bus is parked next to the road.",
)


@functools.cache
def model() -> tuple[Any, Any]:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    loaded = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa")
    return loaded.eval().requires_grad_(False), tokenizer


def recipe(alpha: float | None) -> Recipe:
    """All but the head; what reads one input shares its scales."""
    return Recipe(
        "llama",
        (Rule("lm_head", reason="every error is an answer's"), Rule(r"model\.layers\..*_proj", alpha=alpha)),
        shares=lambda name: re.sub(
            r"(?<=\.)(q|k|v|gate|up)_proj$", lambda m: "qkv" if m[1] in "qkv" else "gate_up", name
        ),
    )


def tokens(text: str) -> torch.Tensor:
    _, tokenizer = model()
    return torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]])


@torch.inference_mode()
def perplexity(language_model: Any, captions: list[str]) -> float:
    total, count = 0.0, 0
    for caption in captions:
        ids = tokens(caption)
        logits = language_model(ids).logits[0, :-1].log_softmax(-1)
        total -= float(logits.gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    return float(torch.tensor(total / count).exp())


@pytest.mark.skipif(not (MODEL / "model.safetensors").is_file(), reason="models/emoji-lm is not here")
def test_perplexity_rises_by_less_than_one_percent(record_property: Any) -> None:
    captions = [line for line in re.split(r"[|\n]", CAPTIONS) if line]
    assert len(captions) == 50
    plain, _ = model()
    statistics = Statistics("emoji-lm")
    layers = recipe(0.5).targets(plain)
    for text in READ:
        with statistics.observe(plain, layers, 0), torch.inference_mode():
            plain(tokens(text))
    whole = perplexity(plain, captions)
    found = {}
    for alpha in (None, 0.5):
        made = copy.deepcopy(plain)
        report = quantize_(made, recipe(alpha), statistics)
        assert len(report.changed) == 7 * 6 and list(report.skipped) == ["lm_head"]
        for block in made.model.layers:
            attention, mlp = block.self_attn, block.mlp
            assert torch.equal(attention.q_proj.inverse, attention.k_proj.inverse)
            assert torch.equal(attention.q_proj.inverse, attention.v_proj.inverse)
            assert torch.equal(mlp.gate_proj.inverse, mlp.up_proj.inverse)
            assert isinstance(mlp.down_proj, Int8Linear)
        found[alpha] = perplexity(made, captions)
    record_property("perplexity", {"fp32": whole, "int8 plain": found[None], "int8": found[0.5]})
    print(f"perplexity: fp32 {whole:.3f}, int8 {found[0.5]:.3f}, int8 plain {found[None]:.3f}")
    assert 10 < whole < 300, "a model that knows nothing would prove nothing"
    assert found[0.5] < 1.01 * whole and found[0.5] < found[None]
