"""Published helpers on the stock pipeline: each skips work and forgets the last picture, or says why not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from diffusers.models.attention import BasicTransformerBlock
from torch.utils.flop_counter import FlopCounterMode

from pipeline.checkpoints import tiny
from tests.evaluation import stock

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning"),  # of diffusers' FasterCache
]
STEPS = 8
PYPI = {"DeepCache-2", "DeepCache-3", "T-GATE", "T-GATE-cross", "T-GATE-DeepCache-2"}
FOR_TRANSFORMERS = {"FirstBlockCache", "MagCache", "SeaCache"}
PROMPTS = ("a red hat", "a blue hat")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> stock.StockPipeline:
    folder = tiny.save(tmp_path_factory.mktemp("stock") / "model", tiny.SDXLShape())
    found = stock.StockPipeline(folder, steps=STEPS, guidance=5.0)
    for prompt in PROMPTS:
        found.encode(prompt)
    return found


@pytest.mark.parametrize("name", [name for name in stock.HELPERS if name != stock.FULL])
def test_a_helper_skips_work_and_keeps_nothing_of_the_last_picture(pipeline: stock.StockPipeline, name: str) -> None:
    full = pipeline.helped(stock.HELPERS[stock.FULL])
    try:
        draw = pipeline.helped(stock.HELPERS[name])
    except stock.Missing as error:
        assert name in PYPI | FOR_TRANSFORMERS, error
        if name in PYPI:
            pytest.skip(str(error))
        assert "one list of transformer blocks" in str(error)
        return
    assert name not in FOR_TRANSFORMERS
    with FlopCounterMode(display=False) as counted:
        exact = full(PROMPTS[0], 1)
    with FlopCounterMode(display=False) as less:
        first = draw(PROMPTS[0], 1)
    assert less.get_total_flops() < 0.97 * counted.get_total_flops()
    draw(PROMPTS[1], 2)
    assert np.array_equal(draw(PROMPTS[0], 1), first) and not np.array_equal(first, exact)
    assert np.array_equal(full(PROMPTS[0], 1), exact), "the stock pipeline has a UNet of its own"


def test_a_hooked_model_without_a_cache_is_the_unet(pipeline: stock.StockPipeline) -> None:
    def make(whole: stock.Call, steps: int) -> stock.Call:
        model = stock.HookedModel(whole.unet, listed=True)  # type: ignore[attr-defined]
        assert all(isinstance(block, BasicTransformerBlock) for block in model.transformer_blocks)
        assert len(model.transformer_blocks) > 0
        return whole

    drawn = pipeline.helped(make)(PROMPTS[0], 1)
    assert np.array_equal(drawn, pipeline.helped(stock.HELPERS[stock.FULL])(PROMPTS[0], 1))


def test_what_is_not_installed_is_said_by_name(pipeline: stock.StockPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tgate", None)
    with pytest.raises(stock.Missing, match="not installed: tgate"):
        pipeline.helped(stock.HELPERS["T-GATE"])


def test_the_folder_of_a_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="model_index"):
        stock.StockPipeline(tmp_path, steps=2, guidance=5.0)
