"""What a model on the CPU kernels holds: packed weights once, and nothing of what they were packed from."""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path

from contract.image import ImageParameters
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from tests.pipeline.worlds import Watching, apart, in_int8, solo

SHAPE = tiny.SDXLShape(native=64, channels=(16, 32, 64), transformers=(1, 1, 2), heads=(1, 2, 4), resnets=2)
ONE = ImageParameters("a red hat", 1, 64, 64, steps=4, preview_every=1)


def held(model: ImageModel) -> int:
    return sum(t.nbytes for module in (model.denoiser, model.vae.decoder) for t in module.state_dict().values())


def test_frugal_lets_go_of_what_is_packed_and_draws_the_same_and_int8_holds_little(
    tmp_path: Path, kernels: ctypes.CDLL
) -> None:
    """The matrices of emoji-xl are far larger, and the share of INT8 is lower."""
    folder, sizes = str(in_int8(tmp_path, SHAPE, kernels)), {}
    for precision in ("fp32", "int8"):
        model = load(folder, precision=precision)
        whole, plain = held(model), Watching(copy.deepcopy(model), kernels=kernels)
        runner = Watching(model, kernels=kernels, frugal=True)
        assert apart(solo(runner, ONE), solo(plain, ONE)) == 0
        # What stays: vectors, and the keys' and values' layers, which are read when a prompt is encoded.
        assert held(model) < 0.25 * whole
        weights = runner.backend.held_bytes()
        assert weights["vae weights"] > 0 and "deep × 2, latents 8x8" in weights
        sizes[precision] = weights["unet weights"]
    assert 0 < sizes["int8"] < 0.4 * sizes["fp32"]
