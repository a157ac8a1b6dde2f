"""What a model on the CPU kernels holds: packed weights once, and nothing of what they were packed from."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path

import pytest

from contract.image import ImageParameters
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from tests.pipeline.worlds import Watching, apart, in_int8, solo

SHAPE = tiny.SDXLShape(native=64, channels=(16, 32, 64), transformers=(1, 1, 2), heads=(1, 2, 4), resnets=2)
ONE = ImageParameters("a red hat", 1, 64, 64, steps=4, preview_every=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, kernels: ctypes.CDLL) -> Path:
    return in_int8(tmp_path_factory.mktemp("models"), SHAPE, kernels)


def held(model: ImageModel) -> int:
    return sum(t.nbytes for module in (model.denoiser, model.vae.decoder) for t in module.state_dict().values())


def test_frugal_lets_go_of_what_is_packed_and_draws_the_same(folder: Path, kernels: ctypes.CDLL) -> None:
    model = load(str(folder), precision="int8")
    whole = held(model)
    plain = solo(Watching(copy.deepcopy(model), kernels=kernels), ONE)
    runner = Watching(model, kernels=kernels, frugal=True)
    frugal = solo(runner, ONE)
    assert apart(frugal, plain) == 0
    # What stays: vectors, and the keys' and values' layers, which are read when a prompt is encoded.
    assert held(model) < 0.25 * whole
    weights = runner.backend.held_bytes()
    assert weights["unet weights"] > 0 and weights["vae weights"] > 0 and "deep × 2, latents 8x8" in weights


def test_int8_holds_little_of_what_fp32_does(folder: Path, kernels: ctypes.CDLL) -> None:
    """Weights as they are held by a frugal runner: the matrices of emoji-xl are far larger, and its share is lower."""
    sizes = {}
    for precision in ("fp32", "int8"):
        runner = Watching(load(str(folder), precision=precision), kernels=kernels, frugal=True)
        sizes[precision] = runner.backend.held_bytes()["unet weights"]
    assert sizes["int8"] < 0.4 * sizes["fp32"]
