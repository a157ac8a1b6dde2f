"""Requests of a pipeline by diffusers' own loop: pictures, turns, ends, and what is refused."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from contract.errors import Invalid
from contract.image import ImageParameters
from contract.image_prompt import ImagePrompt
from contract.picture_input import Edit
from core.batching.engine import Engine
from core.batching.pending import Aborted
from core.batching.request import Outcome, Request
from core.failures import NotFinite
from pipeline.families.diffusers.loop import _CallThread
from pipeline.families.diffusers.runner import DiffusersRunner
from tests.pipeline.families.diffusers.conftest import Folders, Runners
from tests.pipeline.families.diffusers.pipelines import BUILDERS, EDITORS

# Of diffusers about itself, and about its own use of numpy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

STEPS = 3
UNBINNED = ("pixart_sigma", "hunyuan_dit", "sana")  # their tables of resolutions have none as small


def parameters_of(runner: DiffusersRunner, name: str, seed: int = 7, **fields: Any) -> ImageParameters:
    side = runner.model.size_range.shortest
    options = {"use_resolution_binning": False} if name in UNBINNED else None
    defaults = {"steps": STEPS, "guidance_scale": runner.model.defaults.guidance_scale, "pipeline_options": options}
    return ImageParameters("a red fox", seed, side, side, **{**defaults, **fields})


def admitted(runner: DiffusersRunner, id: str, parameters: ImageParameters) -> Request:
    request = Request(id, "image", parameters)
    runner.check(request)
    assert runner.admit(request) is None
    return request


def begun(runners: Runners, name: str, done: int = 0, **fields: Any) -> tuple[DiffusersRunner, Request]:
    """A request of this pipeline that was admitted and has done so many steps."""
    runner = runners(name)
    request = admitted(runner, "begun", parameters_of(runner, name, **fields))
    for _ in range(done):
        step(runner, request)
    return runner, request


def step(runner: DiffusersRunner, request: Request) -> Outcome:
    return runner.launch([request]).outcome()[request.id]


def finish(runner: DiffusersRunner, request: Request) -> Image.Image:
    try:
        while not (outcome := step(runner, request)).finished:
            pass
        return outcome.result.image
    finally:
        runner.release(request)


@functools.cache
def stock(folder: object) -> Any:
    return diffusers.DiffusionPipeline.from_pretrained(str(folder), local_files_only=True)


def called(folder: object, parameters: ImageParameters, kind: type | None = None, **more: Any) -> Image.Image:
    """The picture of the library's own call, on a thread of its own: bits depend on the threads that torch computes
    with, which it counts for each of Python's threads.
    """
    pipeline = stock(folder) if kind is None else kind(**stock(folder).components)
    pipeline.set_progress_bar_config(disable=True)
    area = {"max_area": parameters.width * parameters.height} if "Kontext" in type(pipeline).__name__ else {}
    options = {**(parameters.pipeline_options or {}), **area, **more}
    generator = torch.Generator("cpu").manual_seed(parameters.seed)
    size = {"width": parameters.width, "height": parameters.height}
    call = functools.partial(
        pipeline, prompt=parameters.prompt, num_inference_steps=parameters.steps, generator=generator
    )
    with ThreadPoolExecutor(1) as thread:
        picture: Image.Image = thread.submit(call, **size, **options).result().images[0]
    return picture


@pytest.mark.quick("flux", "flux2_klein", "stable_diffusion_3", "lumina2", "chroma")
@pytest.mark.parametrize("name", BUILDERS)
def test_pictures_equal_the_librarys_own_whatever_runs_between_their_steps(
    name: str, folders: Folders, runners: Runners
) -> None:
    runner = runners(name)
    pair = [parameters_of(runner, name, seed) for seed in (7, 2**40 + 1)]
    first, second, third = (
        admitted(runner, str(k), parameters)
        for k, parameters in enumerate([*pair, parameters_of(runner, name, 3, steps=STEPS + 2)])
    )
    pictures: dict[str, Image.Image] = {}
    progress: dict[str, list[int]] = {first.id: [], second.id: []}
    turn = 0
    while len(pictures) < 2:
        for request in (first, second):
            if request.id not in pictures:
                outcome = step(runner, request)
                assert outcome.progress is not None and outcome.progress[1] == STEPS
                progress[request.id].append(outcome.progress[0])
                if outcome.finished:
                    pictures[request.id] = outcome.result.image
        turn += 1
        if turn <= 3:
            step(runner, third)
        elif third.work is not None:
            runner.release(third)  # cancelled between two of its steps
    for request, parameters in zip((first, second), pair, strict=True):
        assert progress[request.id] == [*range(STEPS + 1), STEPS], "prompts, each step, the decoder"
        assert pictures[request.id].tobytes() == called(folders(name), parameters).tobytes()
        runner.release(request)
    assert pictures["0"].tobytes() != pictures["1"].tobytes()
    assert runner.held() == 0 and runner.capacity.slots.taken == 0
    assert sum(thread.name == "pipeline" for thread in threading.enumerate()) == len(_CallThread._idle)


def picture(size: tuple[int, int], seed: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(levels)


@pytest.mark.parametrize(
    ("name", "kind", "strength"),
    [
        ("flux", diffusers.FluxImg2ImgPipeline, 0.7),
        ("stable_diffusion_3", diffusers.StableDiffusion3Img2ImgPipeline, 0.5),
    ],
)
def test_an_edit_runs_the_pipeline_of_its_kind(
    name: str, kind: type, strength: float, folders: Folders, runners: Runners
) -> None:
    parameters = parameters_of(runners(name), name)
    source = picture(parameters.size, 1)
    runner, request = begun(runners, name, steps=10, edit=Edit(source.tobytes(), strength=strength))
    expected = called(
        folders(name), request.parameters, kind, image=source, strength=strength,
        guidance_scale=parameters.guidance_scale,
    )  # fmt: skip
    assert finish(runner, request).tobytes() == expected.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("name", EDITORS)
def test_a_class_that_edits_alone_needs_a_picture(name: str, folders: Folders, runners: Runners) -> None:
    """And draws from it as the library's own call does."""
    if name == "qwen_image_edit_plus":
        pytest.importorskip("torchvision")
    runner = runners(name)
    parameters = parameters_of(runner, name)
    with pytest.raises(Invalid, match="only edits"):
        runner.check(Request("text", "image", parameters))
    source = picture(parameters.size, 1)
    edited = replace(parameters, edit=Edit(source.tobytes(), strength=1.0))
    expected = called(folders(name), parameters, image=source)
    assert finish(runner, admitted(runner, "edit", edited)).tobytes() == expected.tobytes()


def test_pixels_outside_a_mask_are_kept(folders: Folders, runners: Runners) -> None:
    """The pipeline reads all or nothing of it; its edge is of both."""
    runner = runners("flux")
    parameters = parameters_of(runner, "flux", steps=4)
    source, half = picture(parameters.size, 1), parameters.width // 2
    mask = Image.new("L", parameters.size, 0)
    mask.paste(255, (0, 0, half, parameters.height))
    edged = mask.copy()
    edged.paste(100, (half, 0, half + 3, parameters.height))
    edit = Edit(source.tobytes(), edged.tobytes(), 1.0)
    drawn = finish(runner, admitted(runner, "mask", replace(parameters, edit=edit)))
    expected = called(
        folders("flux"), parameters, diffusers.FluxInpaintPipeline, image=source, mask_image=mask, strength=1.0,
        guidance_scale=parameters.guidance_scale,
    )  # fmt: skip
    shares = edged.point(lambda value: min(2 * value, 255))
    assert drawn.tobytes() == Image.composite(expected, source, shares).tobytes()


def test_an_edit_may_have_several_pictures(folders: Folders, runners: Runners) -> None:
    runner = runners("flux2_klein")
    source, other = picture((64, 64), 1), picture((80, 64), 2)
    second = ImagePrompt(model="reference", image=other.tobytes(), width=80, height=64)
    edit, plain = Edit(source.tobytes(), strength=1.0), parameters_of(runner, "flux2_klein")
    edited = replace(plain, edit=edit, image_prompts=(second,), width=64, height=64)
    drawn = finish(runner, admitted(runner, "several", edited))
    assert drawn.tobytes() == called(folders("flux2_klein"), edited, image=[source, other]).tobytes()


@pytest.mark.long
def test_options_are_the_pipelines_own_arguments(folders: Folders, runners: Runners) -> None:
    options = {"true_cfg_scale": 1.5, "max_sequence_length": 64}
    plain, changed = (
        begun(runners, "qwen_image", negative_prompt="blurry", pipeline_options=given) for given in (None, options)
    )
    drawn, expected = finish(*changed), called(folders("qwen_image"), changed[1].parameters, negative_prompt="blurry")
    assert drawn.tobytes() == expected.tobytes() != finish(*plain).tobytes()


def test_a_step_that_failed_is_repeated_from_the_beginning(
    folders: Folders, runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, request = begun(runners, "lumina2", 2)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(runner.model.modules["transformer"]), "forward", lambda *_, **__: 1 / 0)
        step(runner, request)
    assert finish(runner, request).tobytes() == called(folders("lumina2"), request.parameters).tobytes()


@pytest.mark.parametrize("again", [False, True])
def test_a_failed_request_keeps_no_tensors_although_its_error_is_kept(
    again: bool, runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = list[weakref.ref[torch.Tensor]]()

    def fail(self: Any, timestep: torch.Tensor, **_: Any) -> None:
        inputs.append(weakref.ref(timestep))
        raise ZeroDivisionError

    runner, request = begun(runners, "lumina2", 2)
    latents = weakref.ref(request.work.position.latents)
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as error:
            patch.setattr(type(runner.model.modules["transformer"]), "forward", fail)
            step(runner, request)
        assert [tensor() for tensor in inputs] == [None]
        if again:
            step(runner, request)  # gives up the call that failed
            assert latents() is None
        runner.release(request)
        assert latents() is None
    finally:
        gc.enable()
    assert error.traceback


def test_networks_are_moved_off_the_gpu_when_a_call_ends_early(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled or failed. An offloaded call is cancelled on the lane: networks take long to move, the engine's thread
    goes on meanwhile, and the next iteration waits.
    """
    runner, calls, blocked = runners("lumina2"), list[str](), threading.Event()
    monkeypatch.setattr(type(runner.model.base), "maybe_free_model_hooks", lambda _: calls.append("moved"))
    runner.release(begun(runners, "lumina2", 1)[1])
    assert calls == ["moved"]
    _, failing = begun(runners, "lumina2", 1)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(runner.model.modules["transformer"]), "forward", lambda *_, **__: 1 / 0)
        step(runner, failing)
    runner.release(failing)
    assert calls == ["moved"] * 2
    monkeypatch.setattr(runner.model, "offload", "model")
    _, offloaded = begun(runners, "lumina2", 1)
    runner._lane.start(blocked.wait, lambda _: {})
    runner.release(offloaded)
    assert calls == ["moved"] * 2 and runner.held() == 0
    blocked.set()
    runner._lane.call(lambda: None)
    assert calls == ["moved"] * 3


@pytest.mark.parametrize("result", [Image.new("RGB", (8, 8)), [Image.new("RGB", (64, 64))]])
def test_a_picture_of_another_size_fails_its_request(
    result: object, folders: Folders, runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, request = begun(runners, "flux")
    with monkeypatch.context() as patch, pytest.raises(Invalid) as error:
        patch.setattr(type(runner.model.base.image_processor), "postprocess", lambda *_, **__: [result])
        while not step(runner, request).finished:
            pass
    assert error.value.field == "size"
    assert finish(runner, request).tobytes() == called(folders("flux"), request.parameters).tobytes()


def test_the_engine_serves_shares_and_cancels(runners: Runners) -> None:
    runner = runners("flux")
    events: list[str] = []

    def listen(request: Request, outcome: Outcome) -> None:
        events.append(request.tenant)
        if request.id == "cancelled" and outcome.progress == (2, 50):
            engine.abort("cancelled")

    with_engine = [
        Request(id, "image", parameters_of(runner, "flux", steps=50), listener=listen, tenant=id)
        for id in ("finished", "cancelled")
    ]
    with_engine.append(Request("late", "image", parameters_of(runner, "flux", steps=500), deadline=0.0))
    engine = Engine([runner])
    try:
        finished, cancelled, late = map(engine.submit, with_engine)
        with pytest.raises(Aborted):
            cancelled.result(60)
        assert finished.result(60).parameters.steps == 50
        assert late.exception(60) is not None
    finally:
        engine.close()
    assert events.count("finished") == 52 and events.index("cancelled") < 51, "both had turns"
    assert runner.held() == 0


@pytest.mark.parametrize(
    ("name", "field", "fields"),
    [
        ("flux", "pipeline_options", {"pipeline_options": {"cfg": 1.0}}),
        ("flux", "pipeline_options.true_cfg_scale", {"pipeline_options": {"true_cfg_scale": "much"}}),
        ("sana", "pipeline_options.max_sequence_length", {"pipeline_options": {"max_sequence_length": 200_000}}),
        ("lumina2", "pipeline_options.max_sequence_length", {"pipeline_options": {"max_sequence_length": 0}}),
        ("flux_kontext", "pipeline_options", {"pipeline_options": {"max_area": 2**24}}),
        ("flux", "scheduler", {"scheduler": "euler"}),
        ("flux", "lora", {"lora": "pencil"}),
        ("flux", "guidance_interval", {"guidance_interval": (0.0, 0.5)}),
        ("flux", "size", {"width": 1000}),
        ("flux2_klein", "negative_prompt", {"negative_prompt": "blurry"}),
        ("sana", "image", {"edit": Edit(b"", strength=1.0)}),
        ("flux_kontext", "mask", {"edit": Edit(b"", b"", 1.0)}),
        ("flux", "image_prompts.model", {"image_prompts": (ImagePrompt(model="reference"),)}),
        ("lumina2", "size", {"width": 40, "height": 40}),
    ],
)
def test_what_the_pipeline_does_not_take_is_refused(
    name: str, field: str, fields: dict[str, Any], runners: Runners
) -> None:
    runner = runners(name)
    with pytest.raises(Invalid) as error:
        runner.check(Request("refused", "image", replace(parameters_of(runner, name), **fields)))
    assert error.value.field == field


def test_the_pipelines_own_checks_refuse_early(runners: Runners, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_inputs(_: Any, max_sequence_length: int) -> None:
        raise ValueError(f"`max_sequence_length` is {max_sequence_length}")

    runner = runners("flux")
    monkeypatch.setattr(type(runner.model.base), "check_inputs", check_inputs)
    wanted = parameters_of(runner, "flux", pipeline_options={"max_sequence_length": 100})
    with pytest.raises(Invalid) as error:
        runner.check(Request("long", "image", wanted))
    assert error.value.field == "pipeline_options.max_sequence_length"


@pytest.mark.parametrize(
    ("field", "size", "words"),
    [("image", (32, 32), "Image too small"), ("image_prompts", (640, 64), "Aspect ratio too extreme")],
)
def test_pictures_that_a_call_refuses_are_the_requests_fault(
    field: str, size: tuple[int, int], words: str, runners: Runners
) -> None:
    """Of a pipeline that looks at them in its call alone, not in `check_inputs`."""
    pixels = picture(size, 1).tobytes()
    second = ImagePrompt(model="reference", image=pixels, width=size[0], height=size[1])
    fields = {"edit": Edit(pixels, strength=1.0)} if field == "image" else {"image_prompts": (second,)}
    runner, request = begun(runners, "flux2_klein", **fields)
    with pytest.raises(Invalid, match=words) as error:
        step(runner, request)
    assert error.value.field == field
    runner.release(request)


def test_an_error_of_other_libraries_is_no_fault_of_the_request(
    runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no memory for the image")

    runner, request = begun(runners, "lumina2")
    monkeypatch.setattr(type(runner.model.modules["text_encoder"]), "forward", fail)
    with pytest.raises(ValueError) as error:
        step(runner, request)
    assert not isinstance(error.value, Invalid)
    runner.release(request)


@pytest.mark.parametrize(("name", "expected"), [("stable_diffusion_3", 2), ("flux", 0)])
def test_previews_follow_maps_of_latents(name: str, expected: int, runners: Runners) -> None:
    runner, request = begun(runners, name, preview_every=1)
    outcomes = [step(runner, request)]
    while not outcomes[-1].finished:
        outcomes.append(step(runner, request))
    runner.release(request)
    previews = [outcome.preview for outcome in outcomes if outcome.preview is not None]
    assert len(previews) == expected and all(preview.shape[2] == 3 for preview in previews)


@pytest.mark.parametrize("part", ["vae", "transformer"])
def test_a_picture_of_what_is_not_finite_is_an_error_that_names_the_network(
    part: str, runners: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, request = begun(runners, "flux")
    layer = runner.model.modules[part]
    layer = layer.decoder.conv_out if part == "vae" else layer.proj_out
    monkeypatch.setattr(layer.bias, "data", torch.full_like(layer.bias, torch.nan))
    try:
        with pytest.raises(NotFinite) as caught:
            finish(runner, request)
    finally:
        monkeypatch.undo()
    label = "VAE" if part == "vae" else "denoiser"
    assert str(caught.value) == f"the {label} of flux in fp32 returned NaN or infinity"
    assert np.asarray(finish(*begun(runners, "flux"))).std() > 0
