"""INT8: perplexity rises by less than one percent on kernels that multiply bytes, in 4 bits by less than a tenth;
written, read, refused.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.kernels.kv_cache import TokenBatch
from core.quant.dynamic import Int8DynamicLinear
from core.quant.linear import Int8Linear
from core.quant.statistics import StatisticsError
from llm.backends.attention import cacheless
from llm.backends.select import select
from llm.checkpoints.load import TextModel, TextModelError, load, variant
from llm.checkpoints.quantized import Layerwise, calibrate, make, quantize
from llm.families import tiny
from llm.families.recipe import llama
from llm.runner import TextRunner
from tests.llm import stage

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
TEXTS = [line for part in CAPTIONS.split("\n") for line in part.split("|") if line]


def perplexity(model: TextModel, texts: Sequence[str] = TEXTS) -> float:
    """Of captions, on our kernels."""
    execution = select(model, pages=16, sequences=1, context=256, kernels=stage.kernels())
    execution.cache.place(0, list(range(16)))
    total, count = 0.0, 0
    for text in texts:
        ids = stage.plain(model, text)
        step = TokenBatch.of(list(ids), list(range(len(ids))), [0] * len(ids), list(range(len(ids) - 1)))
        logs = execution.forward(step).logits.log_softmax(-1)
        total -= float(logs.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        count += len(ids) - 1
    return math.exp(total / count)


def test_perplexity_rises_by_less_than_one_percent(record_property: Any) -> None:
    model = stage.emoji()
    read = [stage.plain(model, text) for text in READ]
    found = {"fp32": perplexity(model)}
    for name, recipe in (("int8", llama()), ("int8 plain", llama(None))):
        found[name] = perplexity(quantize(model, read, recipe=recipe))
    record_property("perplexity", found)
    print("perplexity on our kernels:", {name: round(value, 3) for name, value in found.items()})
    assert 10 < found["fp32"] < 100
    assert found["int8"] < 1.01 * found["fp32"] and found["int8"] < found["int8 plain"]


def test_perplexity_rises_by_less_than_a_tenth_in_4_bits() -> None:
    model = stage.emoji()
    made = quantize(model, [stage.plain(model, text) for text in READ], scheme="w4a16")
    assert made.digest != model.digest and made.precision == "w4a16"
    assert 1 < perplexity(made, TEXTS[:16]) / perplexity(model, TEXTS[:16]) < 1.1


def test_every_layer_is_decided_about() -> None:
    model = stage.emoji()
    targets = llama().targets(model.network)
    assert len(targets) == 7 * model.layers and "lm_head" not in targets
    made = quantize(model, [stage.plain(model, READ[0])])
    kinds = [type(module) for name, module in made.network.named_modules() if name in targets]
    assert kinds == [Int8Linear] * len(targets) and type(made.network.lm_head) is Int8DynamicLinear
    plain = quantize(model, [stage.plain(model, READ[0])], layerwise=Layerwise(head=False))
    assert type(plain.network.lm_head) is torch.nn.Linear
    assert len({made.digest, plain.digest, model.digest}) == 3
    embeds = quantize(replace(model, generates=False), [stage.plain(model, READ[0])])
    assert type(embeds.network.lm_head) is torch.nn.Linear  # which nothing reads


def test_what_was_written_is_what_was_made(tmp_path: Path) -> None:
    model = stage.emoji()
    read = [stage.plain(model, text) for text in READ]
    folder = tmp_path / "emoji-lm"
    shutil.copytree(stage.LM, folder)
    source = load(str(folder))
    report = make(source, read, folder)
    assert not report.skipped and report.changed[-1] == "lm_head"
    loaded, wanted = load(str(folder), precision="int8"), quantize(source, read)
    assert perplexity(loaded) == perplexity(wanted)
    size = (folder / variant("int8") / "model.safetensors").stat().st_size
    assert size < 0.38 * 4 * sum(weight.numel() for weight in source.network.parameters())
    manifest = json.loads((folder / variant("int8") / "quantization.json").read_text())
    assert manifest["recipe"] == "llama-alpha0.5-head8" and manifest["calibration"]["texts"] == len(READ)
    spoilt = folder / variant("int8") / "model.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
    with pytest.raises(TextModelError, match="damaged or replaced"):
        load(str(folder), precision="int8")


def test_no_texts_other_weights_and_no_kernels_are_refused(tmp_path: Path) -> None:
    model = stage.small()
    with pytest.raises(StatisticsError, match="there are none"):
        calibrate(model, [], llama())
    folder = tiny.save(tmp_path / "one", tiny.SHAPES[tiny.TINY])
    make(load(str(folder)), [(1, 7, 8, 9)], folder, layerwise=Layerwise(head=False))
    assert type(load(str(folder), precision="int8").network.lm_head) is torch.nn.Linear
    other = tiny.save(tmp_path / "two", tiny.SHAPES[tiny.TINY], seed=1)
    shutil.copytree(folder / variant("int8"), other / variant("int8"))
    with pytest.raises(TextModelError, match="other weights"):
        load(str(other), precision="int8")
    with pytest.raises(TextModelError, match="slower than fp32"):
        TextRunner(load(str(folder), precision="int8"))


@pytest.mark.parametrize(("name", "attention"), [(tiny.GEMMA2_TINY, "eager"), (tiny.GEMMA3_TINY, "sdpa")])
def test_ranges_are_of_attention_that_has_the_models_caps(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions of transformers say that SDPA has Gemma 2's caps, and leave them out."""
    network = load(name).network
    monkeypatch.setattr(type(network), "_supports_sdpa", True)
    assert cacheless(network) == attention
