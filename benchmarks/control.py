"""Measures what control networks cost: a step whose rows all have one, against the step and the network by themselves.

The steps are the runner's own iterations, with all that it does beside the networks' forwards. The model is the
settings' with one of its control networks; or a UNet and a ControlNet in INT8 with random weights: of SDXL's shape on a
GPU, of its widths with fewer transformer blocks on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import lora_load, loras, provenance, record
from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import Lane
from core.config import Settings
from pipeline import control_file, control_variant, tiny
from pipeline.backends.timing import synchronize
from pipeline.control import ControlNetwork, RequestControl, RequestControls
from pipeline.denoise import BatchGatherer, Conditioning
from pipeline.load import ImageModel, load
from pipeline.pinned_cache import PinnedFile
from pipeline.request_state import ImageState
from pipeline.runner import ImageRunner
from unet_opt import recipe
from unet_opt.control import Condition, ControlBranch
from workers import backends
from workers.build import device_of, load_model

_TOKENS = 77  # of a prompt
SHIPPED = provenance.ROOT / "models" / "emoji-xl-controls"
_SIDE, _WHOLE_SIDE = 32, 128  # of latents


class Wanted(NamedTuple):
    """Guided requests of so many `rows` together, each with the network `control`; timed in so many rounds."""

    rows: int = 16
    rounds: int = 20
    control: str = "edges"


def run(
    settings: Settings, wanted: Wanted, *, sdxl: bool = False, widths: Mapping[str, Any] | None = None,
    side: int | None = None, results: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time rounds of a step without controls, of the network alone, and of a step with one on all rows.

    `sdxl`: of networks of these widths with random weights; `side` is of their latents. Raises `record.BenchError` for
    what cannot be measured, and `ModelError`.
    """
    if wanted.rows < 2 or wanted.rows % 2 or not 1 <= wanted.rounds <= 500:
        raise record.BenchError("--rows must be even, as guided images have two; --rounds between 1 and 500")
    whole = device_of(settings) != "cpu"
    if whole and not torch.cuda.is_available():
        raise record.BenchError("--device: there is no GPU here")
    if sdxl:
        side = side or (_WHOLE_SIDE if whole else _SIDE)
    with record.alone():
        lane = Lane("control")
        try:
            if sdxl:
                networks = lane.call(lambda: _random(settings, widths or _widths(whole)))
            else:
                networks = lane.call(lambda: _named(settings, wanted.control))
            measured = _measure(settings, networks, lane, wanted, side)
            threads = lane.call(torch.get_num_threads)
        finally:
            lane.close()
    device = torch.cuda.get_device_name() if whole else "cpu"
    result = _told(networks, measured) | {
        "rows": wanted.rows,
        "rounds": wanted.rounds,
        "threads": threads,
        "device": device,
    }
    own = () if sdxl else ("models/emoji-xl-controls",)
    rooms = (*loras.rooms(sdxl), "benchmarks/control.py", *own)
    return record.publish("control-sdxl" if sdxl else "control", result, results, rooms=rooms)


_KINDS = ("plain", "control", "mixed")
_SHOWN = ("without controls", "the control network alone", "their sum", "all rows with a control")


class _Networks(NamedTuple):
    """A model and one of its ControlNets, which is in this precision."""

    model: ImageModel
    control: Any
    precision: str
    name: str


def _told(networks: _Networks, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The result, which is also printed."""
    every = [measured[f"{kind}_all_ms"] for kind in _KINDS]
    plain, alone, mixed = map(statistics.median, every)
    each = sorted((one + other) / both for one, other, both in zip(*every, strict=True))
    ratio = (plain + alone) / mixed
    rows = [(told, f"{ms:.1f}") for told, ms in zip(_SHOWN, (plain, alone, plain + alone, mixed), strict=True)]
    title = f"{networks.name} in {networks.model.precision}, its control network in {networks.precision}"
    last = ("sum / all rows with a control", f"{ratio:.3f} ({each[0]:.3f} to {each[-1]:.3f})")
    record.table(title, ("a deep step", "ms"), [*rows, last])
    return {
        "plain_ms": plain, "control_ms": alone, "mixed_ms": mixed, "ratio": ratio, "spread": [each[0], each[-1]],
        **measured, "model": networks.name, "precision": networks.model.precision,
        "control_precision": networks.precision,
    }  # fmt: skip


def _widths(whole: bool) -> Mapping[str, Any]:
    """SDXL's, which read what the tiny text encoders make: keys and values are computed once a prompt."""
    blocks = {"transformer_layers_per_block": (1, 2, 10) if whole else (1, 2, 3)}
    return {**lora_load.WIDTHS, **blocks}


def _named(settings: Settings, name: str) -> _Networks:
    """The settings' model, and a network of their folder. Raises `ModelError`."""
    model = load_model(settings)
    folder = Path(settings.control_dir) if settings.control_dir else SHIPPED
    path = control_file.find(folder, name)
    control = control_variant.read(name, path, model).network
    if type(control).__name__ != control_file.CONTROLNET:
        raise record.BenchError(f"--control: {name} is no ControlNet, but a {type(control).__name__}")
    quantized = control_variant.variant_of(path, name, model.precision) is not None
    precision = model.precision if quantized else "floats"
    control = control.to(model.device).eval().requires_grad_(False)
    return _Networks(model, control, precision, Path(model.name).name)


def _random(settings: Settings, widths: Mapping[str, Any]) -> _Networks:
    from diffusers import ControlNetModel

    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = torch.device(device_of(settings))
    whole = device.type == "cuda"
    model = load(tiny.TINY, device=device.type, precision="bf16" if whole else "fp32")
    model = replace(model.with_parts(unet=loras.random_unet(widths, device)), precision="int8")
    own = {name: value for name, value in widths.items() if name != "up_block_types"}
    with device:
        control = ControlNetModel(in_channels=4, layers_per_block=2, **own)
    for layer in (*control.controlnet_down_blocks, control.controlnet_mid_block):
        torch.nn.init.normal_(layer.weight, std=0.1 / layer.in_channels**0.5)  # zero before training
    control = control.to(model.dtype).eval().requires_grad_(False)
    loras.quantize(control, recipe.control(control))
    return _Networks(model, control, "int8", loras.SDXL_WHOLE if whole else loras.SDXL)


def _measure(settings: Settings, networks: _Networks, lane: Lane, wanted: Wanted, side: int | None) -> dict[str, Any]:
    """Milliseconds of each turn, by what ran in it. `side` is of latents; None: the model's own."""
    model = networks.model
    pixels = model.vae_scale * side if side else model.native
    name, why = lane.call(lambda: backends.select(settings, model))
    backend, _ = lane.call(lambda: backends.make(name, settings, model, release=(), why_torch=why))
    runner = ImageRunner(backend, lane=lane, max_requests=wanted.rows)
    try:
        plain, mixed = (_begun(runner, kind, wanted, pixels) for kind in ("plain", "mixed"))
        branch = lane.call(
            lambda: ControlBranch(backend.beside(networks.control), networks.control, model.denoiser, model.vae_scale)
        )
        lane.call(lambda: _give(mixed, branch, pixels))
        alone = lane.call(lambda: _alone(model, branch, mixed))
        turns: dict[str, Callable[[], Any]] = {
            "plain": lambda: runner.launch(plain).outcome(), "control": lambda: lane.call(alone),
            "mixed": lambda: runner.launch(mixed).outcome(),
        }  # fmt: skip
        times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        for turn in range(wanted.rounds + 1):
            for kind in _KINDS:
                begun = time.perf_counter()
                turns[kind]()
                lane.call(lambda: synchronize(model.device))
                if turn:
                    times[kind].append(1000 * (time.perf_counter() - begun))
            while not turn and lane.call(backend.graphs.record_next):  # programs were written, graphs are recorded
                pass
        same = [torch.equal(*(one.work.trajectory.x for one in two)) for two in zip(plain, mixed, strict=True)]
        return {**{f"{kind}_all_ms": own for kind, own in times.items()}, "changed": not any(same), "side": pixels}
    finally:
        runner.close()


def _begun(runner: ImageRunner, kind: str, wanted: Wanted, pixels: int) -> list[Request]:
    """Guided requests, which have been encoded: their steps come next."""
    requests = []
    for seed in range(wanted.rows // 2):
        drawn = ImageParameters("a hat", seed, pixels, pixels, steps=wanted.rounds + 2, guidance_scale=5.0)
        requests.append(Request(f"{kind} {seed}", "image", drawn))
        runner.admit(requests[-1])
    runner.launch(requests).outcome()
    return requests


@torch.inference_mode()
def _give(requests: Sequence[Request], branch: ControlBranch, pixels: int) -> None:
    """Let each of the requests have a picture of its own for this network, in all steps."""
    net, generator = branch.net, torch.Generator().manual_seed(0)
    network: ControlNetwork = PinnedFile("control", 0, "", 0, branch)
    for request in requests:
        work: ImageState = request.work
        picture = torch.randint(0, 256, (1, pixels, pixels, 3), generator=generator, dtype=torch.uint8)
        hidden = torch.randn(work.rows, _TOKENS, net.config.cross_attention_dim, generator=generator)
        text = Conditioning({"kv": branch.prepare_text(hidden.to(net.device, net.dtype))}, 0.0)
        shown = Condition(branch.hint(picture), 1.0), (True,) * len(work.plan)
        work.controls = RequestControls((RequestControl(network, (shown,), {text.rows: text}),))


def _alone(model: ImageModel, branch: ControlBranch, requests: Sequence[Request]) -> Callable[[], Any]:
    """The network's forward for all rows of these requests' next step, on inputs that are gathered now."""
    works: list[ImageState] = [request.work for request in requests]
    gatherer = BatchGatherer(model.dtype, model.family.padded)
    present = [work.trajectory for work in works if work.trajectory is not None]
    rows = sum(work.rows for work in works)
    own = [(work.controls.networks[0], work.rows) for work in works]
    with torch.inference_mode():
        inputs = gatherer.inputs(present, rows)
        texts = gatherer.conditioning([control.texts[wide] for control, wide in own], 0)
        moving = [branch.moving(inputs.sample[:wide], control.conditions(0)) for control, wide in own]
        given = {**texts, "hint": torch.cat([one["hint"] for one in moving])}
    added = {"text_embeds": inputs.conditioning["pooled"], "time_ids": inputs.conditioning["time_ids"]}
    sample = inputs.sample[:, : model.latent_channels]
    return torch.inference_mode()(lambda: branch(sample, inputs.timestep, added, given))
