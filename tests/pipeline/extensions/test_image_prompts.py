"""Image prompts: parity with diffusers, alone and among others; others are not touched by requests with one."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.image import ImageParameters
from contract.plan import AUTO, DeepCache
from pipeline.backends.backend import BatchGroup
from pipeline.backends.phases import DEEP
from pipeline.checkpoints.tiny import SDXLShape
from pipeline.extensions import costs as costs_of
from pipeline.extensions.vision import VisionEncoder
from tests.pipeline import worlds
from tests.pipeline.extensions.checks import check_bits, refusal
from tests.pipeline.ip_adapters import encoder, prompt, save, state, stock_prompted
from tests.pipeline.worlds import Crank, Watching, apart, model, options_of, shared_lane, solo, stock_picture, together

KERNELS, RELEASED = "heads of 16", "released here"  # whose heads the CPU kernels have; one loses its weights


@pytest.fixture(scope="module", autouse=True)
def shapes() -> None:
    worlds.MORE |= dict.fromkeys((KERNELS, RELEASED), SDXLShape(channels=(16, 32), heads=(1, 2)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each shape a folder with an encoder, two adapters of the first kind, and two of Plus."""
    found = {}
    for shape in ("plain", "two-resnets", "v-prediction", KERNELS, RELEASED):
        where = found[shape] = tmp_path_factory.mktemp("adapters")
        encoder(where)
        for number in range(2):
            save(state(model(shape), number, plus=False), where, f"base-{number}")
            save(state(model(shape), 7 + number, plus=True, tokens=6 + 3 * number), where, f"plus-{number}")
    return found


@pytest.fixture
def runner(folders: dict[str, Path]) -> Watching:
    return runner_of(folders["plain"])


def runner_of(folder: Path | None, shape: str = "plain", **options: Any) -> Watching:
    return Watching(model(shape), lane=shared_lane(), image_prompts=folder, **options)


def wanted(shape: str, *prompts: Any, seed: int = 1, **options: Any) -> ImageParameters:
    side = worlds.shape(shape).native
    given = {"prompt": "a red cat", "seed": seed, "width": side, "height": side, "steps": 5, **options}
    return ImageParameters(**given, image_prompts=prompts)


def mixture(shape: str) -> list[ImageParameters]:
    """With an image prompt of each kind, several and none, with and without guidance, in windows of the steps."""
    return [
        wanted(shape, prompt("base-0", 1), seed=1, guidance_scale=6.0),
        wanted(shape, prompt("plus-0", 2, strength=0.6), seed=2, guidance_scale=1.0),
        wanted(shape, seed=3, guidance_scale=4.0),
        wanted(shape, prompt("plus-1", 3, (33, 90)), prompt("base-1", 4, strength=0.3), seed=4),
        wanted(shape, prompt("base-0", 5, end=0.5), seed=5, steps=7, negative_prompt="blue"),
        wanted(shape, prompt("base-1", 1, strength=1.5), prompt("base-1", 6), prompt("plus-0", 7, end=0.6), seed=6),
    ]


def check_parity(shape: str, folder: Path, one: ImageParameters, picture: Any) -> None:
    expected = stock_prompted(shape, folder, one) if one.image_prompts else stock_picture(shape, one)
    assert apart(picture, expected) <= 1, one


@pytest.mark.quick("plain-torch", f"{RELEASED}-kernels")
@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        ("plain", "torch"), ("two-resnets", "torch"), ("v-prediction", "torch"), (RELEASED, "kernels"),
        (KERNELS, "layers"),
    ],
)  # fmt: skip
def test_each_picture_equals_diffusers_alone_and_among_others(
    shape: str, backend: str, kernels: ctypes.CDLL, folders: dict[str, Path]
) -> None:
    options = options_of(backend, kernels)
    runner = runner_of(folders[shape], shape, frugal=shape == RELEASED, **options)
    asked = mixture(shape)
    for one, picture in zip(asked, together(runner, asked), strict=True):
        check_parity(shape, folders[shape], one, picture)
    assert any({"0", "1", "2", "3"} <= riders for riders in runner.companions), "kinds did not share a forward"
    for one in asked[::3]:
        check_parity(shape, folders[shape], one, solo(runner, one))
    assert runner.folder("image_prompts").cache.reads == 5  # each adapter once, and the encoder
    for one in asked[:2]:
        plain = stock_picture(shape, replace(one, image_prompts=()))
        assert apart(stock_prompted(shape, folders[shape], one), plain) > 8, "it would prove nothing"


@pytest.mark.quick(0, 1)
@pytest.mark.parametrize("cached", [None, AUTO, DeepCache(interval=3, depth="block")])
def test_bits_depend_on_no_companion(
    cached: DeepCache | None, kernels: ctypes.CDLL, folders: dict[str, Path]
) -> None:  # fmt: skip
    """With kernels: of pictures with and without image prompts."""
    asked = [replace(one, deepcache=cached) for one in mixture(KERNELS)]
    pictures = check_bits(runner_of(folders[KERNELS], KERNELS, kernels=kernels), asked)
    assert apart(pictures[2], solo(runner_of(None, KERNELS, kernels=kernels), asked[2])) == 0, "it has none"


@pytest.mark.long
def test_deterministic_requests_keep_their_bits_on_torch(runner: Watching) -> None:
    asked = [replace(one, deterministic=True) for one in mixture("plain")]
    asked += [replace(one, seed=one.seed + 10) for one in asked]  # of the same prompts, in a batch together
    for one, picture in zip(asked, check_bits(runner, asked), strict=True):
        assert set(picture.fingerprint.get("image_prompts", ())) == {each.model for each in one.image_prompts}
    shared = runner.companions
    assert any({"0", "6"} <= riders for riders in shared) and not any({"0", "1"} <= riders for riders in shared)


def test_guidance_that_ends_keeps_the_positive_row(runner: Watching) -> None:
    one = wanted("plain", prompt("plus-0"), guidance_scale=5.0, guidance_interval=(0.0, 0.5), steps=6, deepcache=AUTO)
    picture, _ = together(runner, [one, wanted("plain", seed=9)])
    assert apart(picture, solo(runner, one)) <= 1
    assert apart(picture, solo(runner, replace(one, image_prompts=(prompt("plus-0", 1),)))) > 8


def test_what_requests_hold_counts_their_image_prompts(runner: Watching) -> None:
    crank = Crank(runner)
    request = crank.submit("one", wanted("plain", prompt("base-0"), prompt("plus-0")))
    crank.turn()
    work = request.work
    held = sum(each.keys[2].nbytes for each in work.extensions["image_prompts"].prompts)
    assert held > 0 and work.size_bytes == runner.holdings.size_bytes(wanted("plain")) + held
    crank.run()
    assert runner.holdings.memory.taken == 0


def test_their_cost_is_measured_apart_from_the_denoisers(runner: Watching) -> None:
    costs, size = runner.backend.costs, (worlds.shape("plain").native,) * 2
    solo(runner, wanted("plain"))
    alone = {key: dict(seconds) for key, seconds in costs.measured().items()}
    solo(runner, wanted("plain", prompt("base-0")))
    found = costs.measured()
    assert found["deep", size, False] == alone["deep", size, False], "the denoiser's own curve is left alone"
    assert found.keys() - alone.keys() == {(("image_prompts", "deep"), size, False)}
    crank = Crank(runner)
    request = crank.submit("one", wanted("plain", prompt("base-0", end=0.5), steps=4))
    crank.turn()
    own_s = costs_of.left(runner.steps.values(), runner.backend, size, request.work)
    step_s = costs_of.seconds(runner.steps["image_prompts"], runner.backend, DEEP, size, 2)
    assert own_s == pytest.approx(2 * step_s) and own_s > 0
    crank.run()


def test_a_picture_is_seen_once(runner: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all pictures of a job; another picture, and another adapter, are seen anew."""
    seen = []
    embed = VisionEncoder.embed
    monkeypatch.setattr(VisionEncoder, "embed", lambda *a, **k: (seen.append(k["fine"]), embed(*a, **k))[1])
    asked = [wanted("plain", prompt("base-0", 1, strength=0.1 * seed), seed=seed) for seed in range(1, 4)]
    together(runner, asked)
    assert seen == [False]
    solo(runner, wanted("plain", prompt("base-0", 2)))
    solo(runner, wanted("plain", prompt("plus-0", 1)))
    assert seen == [False, False, True, True]  # Plus also sees a picture of nothing


def test_refusals_name_the_field(runner: Watching) -> None:
    given = prompt("base-0")
    for changed, field, words in (
        ((replace(given, model="nothing"),), "image_prompts.model", "there is no nothing.safetensors and no folder"),
        ((given,) * 5, "image_prompts", "must be at most 4, not 5"),
        ((replace(given, image=given.image[:-3]),), "image_prompts.image", "must be of its width and height"),
        ((replace(given, width=0),), "image_prompts.image", "must have at most"),
    ):
        error = refusal(runner, wanted("plain", *changed))
        assert error.field == field and words in error.message, error
    assert "DIPTYCH_IP_ADAPTER_DIR" in refusal(runner_of(None), wanted("plain", given)).message


def test_too_little_room_is_told_and_what_is_evicted_is_read_again(runner: Watching, folders: dict[str, Path]) -> None:
    folder, one = folders["plain"], wanted("plain", prompt("base-0"))
    solo(runner, one)
    held = runner.folder("image_prompts").cache.held
    need = sum(held.values())
    assert len(held) == 2
    assert "DIPTYCH_IP_ADAPTER_MIB" in refusal(runner_of(folder, image_prompt_bytes=need - 1), one).message
    tight = runner_of(folder, image_prompt_bytes=need)
    asked = [wanted("plain", prompt(f"base-{n}", n), seed=n + 1) for n in (0, 1, 0)]
    for one, picture in zip(asked, together(tight, asked), strict=True):
        check_parity("plain", folder, one, picture)
    cache = tight.folder("image_prompts").cache
    assert cache.reads > 3 and sum(cache.held.values()) <= need


def test_encoding_prompts_reads_no_file_and_a_changed_one_is_read_anew(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    where = shutil.copytree(folders["plain"], tmp_path / "adapters")
    crank, one = Crank(runner_of(where)), wanted("plain", prompt("base-0"))
    crank.submit("before", one)
    crank.turn()
    save(state(model("plain"), 99, plus=False), where, "base-0")
    crank.submit("after", one)
    changed = shutil.copytree(where, tmp_path / "changed")
    shutil.rmtree(where)
    pictures = crank.pictures()
    for name, folder in (("before", folders["plain"]), ("after", changed)):
        check_parity("plain", folder, one, pictures[name])
    before, after = pictures["before"], pictures["after"]
    assert apart(before, after) > 3
    assert before.fingerprint["image_prompts"] != after.fingerprint["image_prompts"]


@pytest.mark.parametrize("faster", [0.0, 0.5, 1.0])
def test_an_iteration_faster_than_its_denoiser_is_expected_to_be_counts(faster: float) -> None:
    runner = runner_of(None)
    size, costs = (worlds.shape("plain").native,) * 2, runner.backend.costs
    way = runner.backend.plan(BatchGroup(DEEP, size), 2)
    observe = costs_of.observer("control", runner.backend, BatchGroup(DEEP, size), way, 2)
    observe((1 - faster) * way.seconds)
    first = costs.curve(DEEP, size, False, "control")(2)
    assert 0 < first < way.seconds
    for _ in range(200):
        observe(2 * way.seconds)
    assert costs.curve(DEEP, size, False, "control")(2) > way.seconds / 2, "the curve recovers"
