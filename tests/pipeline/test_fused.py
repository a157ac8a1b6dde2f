"""The image runner on fused layers: parity with diffusers, requests in padded buckets, DeepCache among others.

On a GPU in bf16 and CUDA graphs; elsewhere in fp32, the graphs' callables simply called.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.schedule import DeepCache
from pipeline.execution import Group
from pipeline.folder import ModelError
from pipeline.load import Model, load
from pipeline.parameters import ImageParameters
from tests.pipeline import worlds
from tests.pipeline.test_kernels import SHAPES, mixture, together
from tests.pipeline.worlds import Watching, levels, model, solo, stock_picture

# Stock diffusers hands torch tensors to numpy in a way that numpy 2 complains about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
CUDA = torch.cuda.is_available()


def served(shape: str) -> Model:
    worlds.MORE.update(SHAPES)
    model(shape)  # which names it
    return load(f"random:test-{shape}", precision="bf16", device="cuda") if CUDA else model(shape)


def runner_of(shape: str) -> Watching:
    return Watching(served(shape), fused=True, max_rows=16, buckets=(2, 6, 8, 16), deterministic_rows=8)


# Mean levels from fp32 that bf16 may cost. Torch's own bf16 on a CPU costs these pictures 0.6 to 3.0; another order of
# sums, in fp32 within a layer, may move that by a third, and no layer may add to it.
BF16 = 4.0


def off(picture: object, expected: np.ndarray) -> float:
    return float(np.abs(levels(picture).astype(float) - expected).mean())  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_equal_diffusers(shape: str) -> None:
    parameters = mixture(shape)
    for one, picture in zip(parameters, together(runner_of(shape), parameters), strict=True):
        expected = stock_picture(shape, one)
        assert expected.std() > 10, "a flat picture would prove nothing"
        if CUDA:
            assert off(picture, expected) < BF16
        else:
            assert np.abs(levels(picture) - expected).max() <= 1, one


@pytest.mark.parametrize("depth", ["block", "resnet"])
@pytest.mark.parametrize("shape", SHAPES)
def test_deepcache_is_the_requests_own_in_any_company(shape: str, depth: str) -> None:
    cached = DeepCache(2, depth)
    parameters = [replace(one, deepcache=cached if index % 2 else None) for index, one in enumerate(mixture(shape))]
    mixed = together(runner_of(shape), parameters)
    torch_mixed = together(Watching(model(shape), max_rows=16), parameters)
    for one, picture, wanted in zip(parameters, mixed, torch_mixed, strict=True):
        alone = solo(runner_of(shape), one)
        if CUDA:
            assert off(picture, levels(wanted)) < BF16 and off(picture, levels(alone)) < 3
        else:
            assert np.abs(levels(picture) - levels(wanted)).max() <= 1
            assert np.abs(levels(picture) - levels(alone)).max() <= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_deterministic_pictures_have_their_bytes_in_any_company(shape: str) -> None:
    parameters = [replace(one, deepcache=DeepCache(2, "resnet")) for one in mixture(shape)]
    mixed = together(runner_of(shape), parameters)
    for one, picture in zip(parameters, mixed, strict=True):
        if one.deterministic:
            alone = solo(runner_of(shape), one)
            assert picture.png() == alone.png()
            assert picture.fingerprint["executable"] == "graphs" and picture.fingerprint["bucket"] == 8


def test_forwards_run_at_the_next_bucket() -> None:
    runner = runner_of("wide-heads")
    side = runner.model.native
    one = ImageParameters("a red hat", 1, side, side, steps=2, guidance_scale=1.0)
    together(runner, [replace(one, seed=seed) for seed in range(3)])
    widths = {rows for key, curve in runner.execution.costs().items() if key[0] == "deep" for rows in curve}
    assert widths <= {2, 6, 8, 16} and widths


def test_preparing_measures_what_runs() -> None:
    runner = runner_of("wide-heads")
    runner.prepare(measure_s=60)
    measured = {(key[0], rows) for key, curve in runner.execution.costs().items() for rows in curve}
    phases = ("deep", "shallow", "shallow-resnet")
    assert {(phase, rows) for phase in phases for rows in (2, 6, 8, 16)} | {
        ("vae", 1),
        ("vae", 2),
        ("vae", 4),
    } <= measured


def test_what_is_wider_than_any_forward_costs_more() -> None:
    """As the scheduler asks of all that waits."""
    runner = runner_of("wide-heads")
    runner.prepare(measure_s=60)
    side = runner.model.native
    for phase, widest in (("deep", 16), ("vae", 4)):
        group = Group(phase, (side, side))
        assert runner.cost(group, 10 * widest) >= runner.cost(group, widest)


def test_a_model_that_the_layers_do_not_know_is_refused() -> None:
    with pytest.raises(ModelError, match="heads of width 8"):
        Watching(model("plain"), fused=True)
