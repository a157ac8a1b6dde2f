"""INT8: perplexity rises by less than one percent on kernels that multiply bytes; written, read, refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from core.kernels.kv_cache import TokenBatch
from core.quant.linear import Int8Linear
from core.quant.statistics import StatisticsError
from llm import tiny
from llm.execution import TextExecution
from llm.load import TextModel, TextModelError, load, variant
from llm.quantized import calibrate, make, quantize
from llm.recipe import llama
from llm.runner import TextRunner
from tests.core.quant.test_text import CAPTIONS, READ
from tests.llm import stage

TEXTS = [line for part in CAPTIONS.split("\n") for line in part.split("|") if line]


def perplexity(model: TextModel) -> float:
    """Of captions, on our kernels."""
    execution = TextExecution(model, pages=16, sequences=1, context=256, kernels=stage.kernels())
    execution.cache.place(0, list(range(16)))
    total, count = 0.0, 0
    for text in TEXTS:
        ids = stage.plain(model, text)
        step = TokenBatch.of(list(ids), list(range(len(ids))), [0] * len(ids), list(range(len(ids) - 1)))
        logs = execution(step).log_softmax(-1)
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


def test_every_layer_is_decided_about() -> None:
    model = stage.emoji()
    targets = llama().targets(model.network)
    assert len(targets) == 7 * model.layers and "lm_head" not in targets
    made = quantize(model, [stage.plain(model, READ[0])])
    kinds = [type(module) for name, module in made.network.named_modules() if name in targets]
    assert kinds == [Int8Linear] * len(targets) and type(made.network.lm_head) is torch.nn.Linear
    assert made.digest != model.digest


def test_what_was_written_is_what_was_made(tmp_path: Path) -> None:
    model = stage.emoji()
    read = [stage.plain(model, text) for text in READ]
    folder = tmp_path / "emoji-lm"
    shutil.copytree(stage.LM, folder)
    source = load(str(folder))
    report = make(source, read, folder)
    assert list(report.skipped) == ["lm_head"]
    loaded, wanted = load(str(folder), precision="int8"), quantize(source, read)
    assert perplexity(loaded) == perplexity(wanted)
    with stage.serving(loaded, kernels=stage.kernels()) as (engine, _):
        assert stage.answers(engine, [stage.greedy(stage.chat(loaded, "cat"), 20)])[0].text
    size = (folder / variant("int8") / "model.safetensors").stat().st_size
    assert size < 0.42 * 4 * sum(weight.numel() for weight in source.network.parameters())
    manifest = json.loads((folder / variant("int8") / "quantization.json").read_text())
    assert manifest["recipe"] == "llama-alpha0.5" and manifest["calibration"]["texts"] == len(READ)
    spoilt = folder / variant("int8") / "model.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"?")
    with pytest.raises(TextModelError, match="damaged or replaced"):
        load(str(folder), precision="int8")


def test_no_texts_other_weights_and_no_kernels_are_refused(tmp_path: Path) -> None:
    model = stage.small()
    with pytest.raises(StatisticsError, match="there are none"):
        calibrate(model, [], llama())
    folder = tiny.save(tmp_path / "one", tiny.SHAPES[tiny.TINY])
    make(load(str(folder)), [(1, 7, 8, 9)], folder)
    other = tiny.save(tmp_path / "two", tiny.SHAPES[tiny.TINY], seed=1)
    shutil.copytree(folder / variant("int8"), other / variant("int8"))
    with pytest.raises(TextModelError, match="other weights"):
        load(str(other), precision="int8")
    with pytest.raises(TextModelError, match="slower than fp32"):
        TextRunner(load(str(folder), precision="int8"))
