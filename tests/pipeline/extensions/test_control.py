"""ControlNets: parity with diffusers, alone and among others; others are not touched by requests with one."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.image import Edit, ImageParameters
from contract.plan import AUTO, DeepCache
from pipeline.backends.phases import ENCODE
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.extensions.control_rows import _chunks, _Rows, _Span
from tests.pipeline import worlds
from tests.pipeline.controls import control, controlnet, save, stock_controlled
from tests.pipeline.extensions.checks import check_bits, refusal
from tests.pipeline.pixels.test_edit import hole, photograph, with_kept
from tests.pipeline.worlds import Crank, Watching, apart, model, options_of, shared_lane, solo, stock_picture, together
from unet_opt.inputs import DenoiserInputs

KERNELS, RELEASED = "heads-of-16", "released"  # shapes whose heads the CPU kernels have; one loses its weights


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE |= dict.fromkeys((KERNELS, RELEASED), SDXLShape(channels=(16, 32), heads=(1, 2)))


@pytest.fixture(scope="module")
def nets() -> dict[str, Any]:
    """Two for each shape, by the names of their folders."""
    names = ("plain", "two-resnets", "v-prediction", KERNELS, RELEASED)
    return {f"{shape}-{n}": controlnet(model(shape), n) for shape in names for n in range(2)}


@pytest.fixture(scope="module")
def folder(nets: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("controls")
    for name, net in nets.items():
        save(net, where, name)
    return where


@given(st.lists(st.integers(1, 2), min_size=1, max_size=9), st.integers(2, 8))
def test_networks_run_in_chunks_of_no_more_rows_than_the_denoiser_has(rows: list[int], most: int) -> None:
    """In order, each chunk as large as it may be."""
    ends = [0, *itertools.accumulate(rows)]
    control: Any = None
    entries = [_Rows(control, _Span(start, count), ()) for start, count in zip(ends, rows, strict=False)]
    chunks = _chunks(entries, most)
    assert [entry for chunk in chunks for entry in chunk] == entries
    counts = [sum(entry.span.rows for entry in chunk) for chunk in chunks]
    assert max(counts) <= most
    assert all(count + after[0].span.rows > most for count, after in zip(counts, chunks[1:], strict=False))


@pytest.fixture
def runner(folder: Path) -> Watching:
    return runner_of(folder)


def runner_of(folder: Path | None, shape: str = "plain", **options: Any) -> Watching:
    return Watching(model(shape), lane=shared_lane(), controls=folder, **options)


def wanted(shape: str, *nets: int, seed: int = 1, **options: Any) -> ImageParameters:
    """A picture that follows a control by each of these of the shape's networks."""
    side = worlds.shape(shape).native
    windows = options.pop("windows", [{}] * len(nets))
    controls = tuple(control(f"{shape}-{n}", side, seed + n, **window) for n, window in zip(nets, windows, strict=True))
    given = {"prompt": "a red cat", "seed": seed, "width": side, "height": side, "steps": 5, **options}
    return ImageParameters(**given, control=controls)


def check_parity(shape: str, nets: dict[str, Any], one: ImageParameters, picture: Any) -> None:
    used = tuple(nets[control.model] for control in one.control)
    expected = stock_controlled(shape, used, one) if used else stock_picture(shape, one)
    assert apart(picture, with_kept(one, expected)) <= 1, one
    if used and one.edit is None:
        assert apart(expected, stock_picture(shape, replace(one, control=()))) > 3, "it would prove nothing"


def mixture(shape: str) -> list[ImageParameters]:
    """With one control, two and none, with and without guidance, in windows of the steps, and edits of a picture."""
    side = worlds.shape(shape).native
    edit = Edit(photograph(side).tobytes(), None, 0.7)
    return [
        wanted(shape, 0, seed=1, guidance_scale=6.0),
        wanted(shape, 0, seed=2, guidance_scale=1.0, windows=[{"strength": 0.4}]),
        wanted(shape, seed=3, guidance_scale=4.0),
        wanted(shape, 1, 0, seed=4, windows=[{"strength": 0.7}, {"strength": 1.3}]),
        wanted(shape, 0, seed=5, steps=7, windows=[{"start": 0.2, "end": 0.7}]),
        wanted(shape, 1, 1, seed=6, windows=[{"end": 0.5}, {"start": 0.5}], negative_prompt="blue"),
        wanted(shape, 1, seed=7, edit=edit, steps=6),
        wanted(shape, 0, seed=8, edit=replace(edit, mask=hole(side).tobytes(), strength=1.0), guidance_scale=5.0),
    ]


@pytest.mark.quick("plain-torch", f"{KERNELS}-layers")
@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        ("plain", "torch"), ("two-resnets", "torch"), ("v-prediction", "torch"), (RELEASED, "kernels"),
        (KERNELS, "layers"),
    ],
)  # fmt: skip
def test_each_picture_equals_diffusers_alone_and_among_others(
    shape: str, backend: str, kernels: ctypes.CDLL, nets: dict[str, Any], folder: Path
) -> None:
    runner = runner_of(folder, shape, frugal=shape == RELEASED, **options_of(backend, kernels))
    asked = mixture(shape)
    for one, picture in zip(asked, together(runner, asked), strict=True):
        check_parity(shape, nets, one, picture)
    assert any({"0", "2"} <= riders for riders in runner.companions), "one without a control rode alone"
    for one in asked[::3]:
        check_parity(shape, nets, one, solo(runner, one))
    assert runner.folder("control").cache.reads == 2  # each network once


@pytest.mark.quick(0, 1)
@pytest.mark.parametrize("cached", [None, AUTO, DeepCache(interval=3, depth="block")])
def test_bits_depend_on_no_companion(cached: DeepCache | None, kernels: ctypes.CDLL, folder: Path) -> None:
    """With kernels: of pictures with and without controls, also where shallow steps read what a deep one left."""
    ending = wanted(KERNELS, 0, seed=9, guidance_scale=5.0, guidance_interval=(0.0, 0.5), steps=6)
    asked = [replace(one, deepcache=cached) for one in (*mixture(KERNELS), ending)]
    pictures = check_bits(runner_of(folder, KERNELS, kernels=kernels), asked)
    assert apart(pictures[2], solo(runner_of(None, KERNELS, kernels=kernels), asked[2])) == 0, "it has none"


def test_deterministic_requests_keep_their_bits_on_torch(runner: Watching) -> None:
    asked = [replace(one, deterministic=True) for one in mixture("plain")]
    for one, picture in zip(asked, check_bits(runner, asked), strict=True):
        assert set(picture.fingerprint.get("control", ())) == {each.model for each in one.control}


@pytest.mark.parametrize("depth", ["block", "resnet"])
def test_a_shallow_step_of_the_same_inputs_repeats_the_deep_one(depth: str, runner: Watching) -> None:
    """What the control added in the deep step is in all that the shallow one reads."""
    network = runner.backend.denoiser
    generator = torch.Generator().manual_seed(0)
    given = model("plain").family.example(model("plain"), network.text_width, 2, generator, 1)
    sample = torch.randn(2, 4, 4, 4, generator=generator)
    inputs = DenoiserInputs(sample, torch.tensor([900.0, 500.0]), given)
    shapes = [(2, 4, 4, 16), (2, 4, 4, 16), (2, 2, 2, 16), (2, 2, 2, 32), (2, 2, 2, 32)]
    residuals = [torch.randn(shape, generator=generator) for shape in shapes]
    with torch.inference_mode():
        deep, *features = network.deep(inputs, residuals=residuals)
        kept = network.select_features(features, depth)
        (again,) = network.shallow(depth, inputs, kept, residual=residuals[0])
        (without,) = network.shallow(depth, inputs, kept)
    assert torch.equal(deep, again) and not torch.allclose(deep, without, atol=1e-2)


def test_refusals_name_the_field(runner: Watching) -> None:
    one = wanted("plain", 0)
    (given,) = one.control
    for changed, field, words in (
        ((replace(given, model="nothing"),), "control.model", "there is no folder nothing and no nothing.safetensors"),
        ((given,) * 5, "control", "must be at most 4, not 5"),
        ((replace(given, image=given.image[:-3]),), "control.image", "must have the image's size"),
        ((replace(given, start=0.5, end=0.5),), "control.end", "must be greater than start"),
        ((replace(given, strength=11.0),), "control.strength", "must be between 0 and 10"),
        ((replace(given, preprocessor="pose"),), "control.preprocessor", "must be one of canny, depth"),
        ((replace(given, model="../secret"),), "control.model", "must be a name"),
    ):
        error = refusal(runner, replace(one, control=changed))
        assert error.field == field and words in error.message, error
    assert "DIPTYCH_CONTROL_DIR" in refusal(runner_of(None), one).message


def test_their_pictures_do_not_count_as_what_prompts_cost_to_encode(runner: Watching) -> None:
    curve = runner.backend.costs.curve(ENCODE, (0, 0), False)
    solo(runner, wanted("plain", 0))
    assert not curve.measured
    solo(runner, wanted("plain", prompt="a moor"))
    assert [*curve.measured] == [2]


def test_what_requests_hold_counts_their_controls(runner: Watching) -> None:
    crank = Crank(runner)
    request = crank.submit("one", wanted("plain", 0))
    crank.turn()
    work = request.work
    (held,) = work.extensions["control"].controls.networks
    ((condition, _),) = held.pictures
    own = condition.hint.nbytes + held.texts[work.rows].tensors["kv"].nbytes
    without = runner.holdings.size_bytes(wanted("plain"))
    assert work.size_bytes == without + own + 2 * condition.hint.nbytes
    crank.run()
    assert runner.holdings.memory.taken == 0
