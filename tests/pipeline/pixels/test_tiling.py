"""Large pictures go through the VAE in tiles: diffusers' own result, in memory that does not grow with the picture."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.image import Edit, ImageParameters
from pipeline.backends.backend import BatchGroup
from pipeline.backends.phases import DEEP, VAE, VAE_TINY
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel
from pipeline.pixels import tiling
from pipeline.sizes import size_range
from tests.pipeline import worlds
from tests.pipeline.pixels.test_edit import photograph, stock_edit
from tests.pipeline.worlds import (
    Watching,
    apart,
    backend_of,
    model,
    options_of,
    solo,
    stock,
    stock_picture,
    tiny_model,
    together,
)  # fmt: skip

SHAPE = "tiles"
# In latents, of tiles of 4 that overlap by 1: one tile high, a last tile of one line, nothing left over, several.
LATENTS = [(4, 7), (5, 5), (7, 10), (10, 4), (11, 9)]


worlds.MORE[SHAPE] = tiny.SDXLShape(heads=(1, 2), vae_attention=True)


def tiled(model: ImageModel, above: int = 0) -> ImageModel:
    """The model, which takes all larger pictures in tiles."""
    return replace(model, tiled_above=above, max_pixels=128 * 128)


@contextmanager
def tiling_on(shape: str) -> Iterator[Any]:
    """The stock pipeline's VAE with diffusers' tiling."""
    vae = stock(shape).vae
    vae.enable_tiling()
    try:
        yield vae
    finally:
        vae.disable_tiling()


def latents(height: int, width: int, count: int = 1) -> torch.Tensor:
    return torch.randn(count, 4, height, width, generator=torch.Generator().manual_seed(height * width))


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["torch", "kernels", "layers"])
@pytest.mark.parametrize("size", LATENTS)
def test_decoded_tiles_are_diffusers(size: tuple[int, int], backend: str, kernels: ctypes.CDLL) -> None:
    given_latents, options = latents(*size, count=2), options_of(backend, kernels)
    divided, undivided = backend_of(tiled(model(SHAPE)), **options), backend_of(model(SHAPE), **options)
    with tiling_on(SHAPE) as vae, torch.inference_mode():
        wanted = vae.decode(given_latents / vae.config.scaling_factor).sample
        found, whole = (backend.phases[VAE](given_latents)[0] for backend in (divided, undivided))
    expected = (wanted * 0.5 + 0.5).clamp(0, 1).mul(255).round().permute(0, 2, 3, 1)
    assert found.shape == (2, 8 * size[0], 8 * size[1], 3) and found.dtype is torch.uint8
    assert expected.std() > 10, "a flat picture would prove nothing"
    assert (found.float() - expected).abs().max() <= 1
    assert (whole.float() - expected).abs().max() > 1, "tiles made no difference"


@pytest.mark.parametrize("size", LATENTS)
def test_encoded_tiles_are_diffusers(size: tuple[int, int]) -> None:
    pixels = torch.rand(2, 3, 8 * size[0], 8 * size[1], generator=torch.Generator().manual_seed(1)) * 2 - 1
    one = model(SHAPE)
    with tiling_on(SHAPE) as vae, torch.inference_mode():
        expected = vae.encode(pixels).latent_dist
        found, whole = tiling.posterior(tiled(one), pixels), tiling.posterior(one, pixels)
    assert (found.mean - expected.mean).abs().max() < 1e-5 and (found.std - expected.std).abs().max() < 1e-5
    assert (whole.mean - expected.mean).abs().max() > 1e-3, "tiles made no difference"


def mixture() -> list[ImageParameters]:
    sizes = [(88, 64), (40, 72), (32, 32), (88, 64)]
    drawn = [
        ImageParameters("a red hat", seed, width, height, steps=3 + seed, guidance_scale=1.0 + 4 * (seed % 2))
        for seed, (width, height) in enumerate(sizes)
    ]
    edit = Edit(photograph(64).tobytes(), None, 0.7)
    return [*drawn, ImageParameters("a red cat", 9, 64, 64, steps=5, edit=edit)]


def expected_picture(one: ImageParameters) -> Any:
    with tiling_on(SHAPE):
        return stock_picture(SHAPE, one) if one.edit is None else stock_edit(SHAPE, one)


@pytest.mark.quick("torch", "kernels")
@pytest.mark.parametrize("backend", ["torch", "kernels", "graphs"])
def test_pictures_are_diffusers_alone_and_among_others(backend: str, kernels: ctypes.CDLL) -> None:
    runner = Watching(tiled(model(SHAPE)), **options_of(backend, kernels))
    parameters = [replace(one, deterministic=backend == "kernels") for one in mixture()]
    for one, drawn, picture in zip(mixture(), parameters, together(runner, parameters), strict=True):
        assert apart(picture, expected_picture(one)) <= 1, one
        assert picture.fingerprint.get("tiles") == (None if one.width == 32 else 32)
        assert backend != "kernels" or solo(runner, drawn).png() == picture.png()
    runner.close()


def test_only_larger_pictures_are_divided() -> None:
    one = tiled(model(SHAPE), above=64 * 64)
    assert tiling.tile_side(one, (64, 64)) == 0 and tiling.tile_side(one, (72, 64)) == 32
    assert tiling.tile_side(tiled(one), (32, 24)) == 0, "it is one tile"
    large = replace(model(SHAPE), max_pixels=2**24)
    assert [tiling.tile_side(large, (width, 1536)) for width in (1536, 1544)] == [0, 32]


def test_memory_does_not_grow_with_the_picture(kernels: ctypes.CDLL) -> None:
    def buffers(model: ImageModel, side: int) -> int:
        backend = backend_of(model, kernels=kernels)
        with torch.inference_mode():
            backend.phases[VAE](latents(side, side))
        _, programs = backend._lowerings["vae"].size_bytes  # type: ignore[attr-defined]
        return max(programs.values())

    one = model(SHAPE)
    assert buffers(tiled(one), 7) == buffers(tiled(one), 16) == buffers(one, 4)
    assert buffers(one, 16) > 10 * buffers(one, 4)


def test_a_tiny_decoder_in_tiles_hardly_differs_from_the_whole() -> None:
    """It has no reader beyond its convolutions' reach, so that only the tiles' edges differ, which are faded out."""
    one = tiny_model("three-levels")  # tiles of 8 latents
    given_latents = latents(20, 13)
    undivided, divided = backend_of(one), backend_of(tiled(one))
    with torch.inference_mode():
        whole, found = (backend.phases[VAE_TINY](given_latents)[0].float() for backend in (undivided, divided))
    assert found.shape == whole.shape and 0 < (found - whole).abs().mean() < 0.2 * whole.std()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([4, 8, 12]), st.sampled_from([1, 2, 8]))
def test_what_each_element_gives_alone_is_the_same_in_tiles(height: int, width: int, side: int, scale: int) -> None:
    x = torch.randn(2, height, width, 3, generator=torch.Generator().manual_seed(height))

    def compute(part: torch.Tensor) -> torch.Tensor:
        return part.repeat_interleave(scale, 1).repeat_interleave(scale, 2) * 2

    def bounded(tile: torch.Tensor) -> torch.Tensor:
        assert max(tile.shape[1:3]) <= side
        return compute(tile)

    found = tiling.in_tiles(x, bounded, side, side * scale, lambda tile: tile + 1)
    assert torch.allclose(found, compute(x) + 1, atol=1e-5)


def test_forwards_of_larger_pictures_have_fewer_rows() -> None:
    runner = Watching(tiled(model(SHAPE)), max_rows=16)
    limits = {side: runner.limit(BatchGroup(DEEP, (side, 32))) for side in (16, 32, 48, 96, 128, 4096)}
    assert limits == {16: 16, 32: 16, 48: 16, 96: 8, 128: 6, 4096: 2}


def test_more_pixels_are_offered_where_a_service_says_so() -> None:
    few, many = (size_range(1024, 8, side * side) for side in (1024, 2048))
    assert (4096, 1024) in many and (2048, 2048) in many and (2056, 2048) not in many and (4104, 256) not in many
    assert (2048, 512) in few and (1032, 1024) not in few
