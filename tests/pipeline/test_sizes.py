"""Pictures of all sizes that are multiples of a latent, which a UNet's levels do not halve evenly: diffusers' own."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.card import ImageOffer
from contract.errors import Invalid
from contract.image import ImageParameters
from contract.plan import DeepCache
from core.config import EMBEDDED_MODEL
from pipeline import sizes
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.sizes import size_range
from tests.pipeline import worlds
from tests.pipeline.backends.test_programs import SHAPES
from tests.pipeline.worlds import Watching, apart, check_parity, model, options_of, solo, together

SHAPE = "deep"
SIZES = [(72, 56), (40, 64), (56, 72), (88, 40), (24, 16)]  # in latents 9×7, 5×8, 7×9, 11×5, 3×2: none halves twice


worlds.MORE.update(SHAPES)


def mixture(**fields: Any) -> list[ImageParameters]:
    return [
        ImageParameters(
            f"a {colour} hat", seed, width, height, steps=steps, guidance_scale=guidance, scheduler=sampler, **fields
        )
        for seed, ((width, height), (colour, steps, guidance, sampler)) in enumerate(
            zip(
                [SIZES[0], SIZES[0], SIZES[0], *SIZES[1:]],
                (("red", 4, 5.0, None), ("teal", 3, 1.0, "euler"), ("pink", 5, 7.0, "dpm++2m"), ("big", 4, 3.0, "lcm"),
                 ("old", 5, 4.0, "euler"), ("new", 3, 2.0, "euler-ancestral"), ("far", 3, 6.0, None)),
                strict=True,
            )
        )
    ]  # fmt: skip


@pytest.mark.quick("kernels")
@pytest.mark.parametrize("backend", ["torch", "kernels", "layers", "graphs"])
def test_pictures_equal_diffusers_alone_and_in_batches_that_others_join(backend: str, kernels: ctypes.CDLL) -> None:
    runner = Watching(model(SHAPE), max_rows=16, **options_of(backend, kernels))
    native = ImageParameters("a red hat", 8, 64, 64, steps=3, deterministic=True)
    parameters = [*mixture(deterministic=True), native]
    pictures = together(runner, parameters)
    assert any(len(ride) > 1 for ride in runner.companions), "nobody rode with anybody"
    for one, picture in zip(parameters, pictures, strict=True):
        check_parity(SHAPE, one, picture)
    for one, picture in [*zip(parameters, pictures, strict=True)][::3]:
        check_parity(SHAPE, one, solo(runner, one))
        assert apart(picture, solo(runner, one)) <= (backend != "kernels")
    runner.close()


@pytest.mark.quick("block")
@pytest.mark.parametrize("depth", ["block", "resnet"])
def test_shallow_steps_are_torchs_on_all_backends(depth: str, kernels: ctypes.CDLL) -> None:
    parameters = mixture(deepcache=DeepCache(2, depth))
    expected, deep = (together(Watching(model(SHAPE), max_rows=16), each) for each in (parameters, mixture()))
    assert any(apart(*each) > 1 for each in zip(expected, deep, strict=True)), "no step was shallow"
    for backend in ("kernels", "graphs"):
        runner = Watching(model(SHAPE), max_rows=16, **options_of(backend, kernels))
        assert max(map(apart, together(runner, parameters), expected)) <= 1
        runner.close()


SIDES = st.integers(0, 400).map(lambda n: 8 * n) | st.integers(0, 3000)


@settings(deadline=None)
@given(SIDES, SIDES)
def test_exactly_the_sizes_of_the_range_are_offered(width: int, height: int) -> None:
    offer = ImageOffer([(1024, 1024)], ("euler",), native=(1024, 1024), size_range=size_range(1024, 8))
    ratio = width % 8 == height % 8 == 0 and min(width, height) >= 256 and max(width, height) <= 2048
    if ratio and width * height <= 1536 * 1024:
        offer.check_size(width, height)
        assert offer.size(f"{width}x{height}") == (width, height)
        return
    for refused in (lambda: offer.check_size(width, height), lambda: offer.size(f"{width}x{height}")):
        with pytest.raises(Invalid, match=r"^size: .*; and any sides from 256 to 2048 that are multiples of 8"):
            refused()


def test_sizes_that_a_model_was_trained_at_are_offered(tmp_path: Path) -> None:
    """Also those above the range of others, as far as the settings allow; its digest stays."""
    folder = tiny.save(tmp_path / "model", tiny.SDXLShape())
    plain = load(str(folder))
    sizes.write(folder, [(32, 32), (48, 48)])
    one = load(str(folder))
    assert {*one.sizes} - {*plain.sizes} == {(48, 48)} and one.digest == plain.digest
    assert one.size_range == plain.size_range and (48, 48) not in one.size_range
    runner = Watching(one)
    drawn = ImageParameters("a hat", 0, 48, 48, steps=2)
    assert solo(runner, drawn).image.size == (48, 48)
    with pytest.raises(Invalid, match=r"size: 56x48 is not offered; offered: 48x48, .*; and any sides"):
        solo(runner, ImageParameters("a hat", 0, 56, 48, steps=2))
    assert replace(one, max_pixels=40 * 48).sizes == plain.sizes
    assert (192, 192) in sizes.trained(EMBEDDED_MODEL, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ('{"version": 2, "trained": []}', "is no sizes.json of version 1"),
        ('{"version": 1}', "is no sizes.json of version 1"),
        ('{"version": 1, "trained": [48]}', "trained must list sizes"),
        ('{"version": 1, "trained": ["48x0"]}', "trained must list sizes"),
        ('{"version": 1, "trained": ["48x52"]}', "multiples of 8"),
        ('{"version": 1, "trained": ["4104x48"]}', "up to 4096"),
    ],
)
def test_other_files_are_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / sizes.FILE).write_text(text)
    with pytest.raises(ModelError, match=rf"sizes\.json: .*{said}"):
        sizes.trained(tmp_path, 8)
