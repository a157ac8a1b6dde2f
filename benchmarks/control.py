"""Measures what control networks cost: a step whose rows all have one, against the step and the network by themselves.

The steps are the runner's own iterations, with all that it does beside the networks' forwards. The model is the
settings' with one of its control networks; or a UNet and a ControlNet in INT8 with random weights: of SDXL's shape on a
GPU, of its widths with fewer transformer blocks on a CPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import models, provenance, record
from benchmarks.harness.timing import elapsed_ms, turns
from contract.control import FIELD
from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import Lane
from core.config import Settings
from pipeline.backends.timing import synchronize
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import ImageModel, load
from pipeline.extensions import control_file, control_variant
from pipeline.extensions.asset_cache import Asset
from pipeline.extensions.control_rows import ControlLease, ControlNetwork, RequestControl, RequestControls
from pipeline.request_state import ImageState
from pipeline.runner import ImageRunner
from pipeline.sampling.denoise import BatchGatherer, Conditioning
from unet_opt import recipe
from unet_opt.control import Condition, ControlBranch
from workers import backends
from workers.build import device_of, load_model

_TOKENS = 77  # of a prompt
SHIPPED = provenance.ROOT / "models" / "emoji-xl-controls"
_SIDE, _WHOLE_SIDE = 32, 128  # of latents


class ControlStep(NamedTuple):
    """Guided requests of so many `rows` together, each with the network `control`; timed in so many rounds."""

    rows: int = 16
    rounds: int = 20
    control: str = "edges"


class _Networks(NamedTuple):
    """A model and one of its ControlNets, which is in this precision."""

    model: ImageModel
    control: Any
    precision: str
    name: str


def run(
    settings: Settings, options: ControlStep, *, sdxl: bool = False, widths: Mapping[str, Any] | None = None,
    side: int | None = None, results: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time rounds of a step without controls, of the network alone, and of a step with one on all rows.

    `sdxl`: of networks of these widths with random weights; `side` is of their latents. Raises `record.BenchError` for
    what cannot be measured, and `ModelError`.
    """
    cuda = device_of(settings) != "cpu"
    _check(options, cuda)
    # The widths read what the tiny text encoders make: keys and values are computed once a prompt.
    widths = widths or {**(models.WHOLE if cuda else models.WIDTHS), **models.TINY_TEXT}
    if sdxl:
        side = side or (_WHOLE_SIDE if cuda else _SIDE)
    with record.alone():
        lane = Lane("control")
        try:
            networks = lane.call(lambda: _random(settings, widths) if sdxl else _named(settings, options.control))
            times, description = _measure(settings, networks, lane, options, side)
            threads = lane.call(torch.get_num_threads)
        finally:
            lane.close()
    result = _figures(networks, times) | description | {
        "rows": options.rows, "rounds": options.rounds, "threads": threads,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }  # fmt: skip
    artifacts = () if sdxl else (*provenance.EMOJI_XL, "models/emoji-xl-controls")
    return record.publish("control-sdxl" if sdxl else "control", result, results, artifacts=artifacts)


def _check(options: ControlStep, cuda: bool) -> None:
    if options.rows < 2 or options.rows % 2 or not 1 <= options.rounds <= 500:
        raise record.BenchError("--rows must be even, as guided images have two; --rounds between 1 and 500")
    if cuda and not torch.cuda.is_available():
        raise record.BenchError("--device: there is no GPU here")


def _figures(networks: _Networks, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians and ratios, which are also printed."""
    plain, alone, mixed = (statistics.median(seconds) for seconds in times.values())
    ratios = sorted((timing + other) / both for timing, other, both in zip(*times.values(), strict=True))
    ratio, precision = (plain + alone) / mixed, networks.model.precision
    variants = {"without controls": plain, "the control network alone": alone, "their sum": plain + alone,
             "all rows with a control": mixed}  # fmt: skip
    title = f"{networks.name} in {precision}, its control network in {networks.precision}"
    last = "sum / all rows with a control", f"{ratio:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    record.table(title, ("a deep step", "ms"), [*((name, f"{ms:.1f}") for name, ms in variants.items()), last])
    return {
        "plain_ms": plain, "control_ms": alone, "mixed_ms": mixed, "ratio": ratio, "spread": [ratios[0], ratios[-1]],
        **{f"{kind}_all_ms": ms for kind, ms in times.items()}, "model": networks.name, "precision": precision,
        "control_precision": networks.precision,
    }  # fmt: skip


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
    full = device.type == "cuda"
    model = load(tiny.TINY, device=device.type, precision="bf16" if full else "fp32")
    model = replace(model.with_parts(unet=models.random_unet(widths, device)), precision="int8")
    sizes = {name: value for name, value in widths.items() if name != "up_block_types"}
    with device:
        control = ControlNetModel(in_channels=4, layers_per_block=2, **sizes)
    for layer in (*control.controlnet_down_blocks, control.controlnet_mid_block):
        torch.nn.init.normal_(layer.weight, std=0.1 / layer.in_channels**0.5)  # zero before training
    control = control.to(model.dtype).eval().requires_grad_(False)
    models.quantize(control, recipe.control(control))
    return _Networks(model, control, "int8", models.SDXL_WHOLE if full else models.SDXL)


def _measure(
    settings: Settings, networks: _Networks, lane: Lane, options: ControlStep, side: int | None
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Milliseconds of each turn by what ran in it, and whether controls changed all images.

    `side` is of latents; None: the model's own.
    """
    model = networks.model
    pixels = model.vae_scale * side if side else model.native
    name, reason = lane.call(lambda: backends.select(settings, model))
    backend, _ = lane.call(lambda: backends.make(name, settings, model, release=(), why_torch=reason))
    runner = ImageRunner(backend, lane=lane, max_requests=options.rows)

    def record_all() -> None:  # programs were written, graphs are recorded
        while lane.call(backend.graphs.record_next):
            pass

    def settle() -> None:
        lane.call(lambda: synchronize(model.device))

    try:
        plain, mixed = (_begun(runner, kind, options, pixels) for kind in ("plain", "mixed"))
        branch = lane.call(
            lambda: ControlBranch(
                backend.lowering_for(networks.control), networks.control, model.denoiser, model.vae_scale
            )
        )
        lane.call(lambda: _give(mixed, branch, pixels))
        alone = lane.call(lambda: _alone(model, branch, mixed))
        contenders: dict[str, Callable[[], Any]] = {
            "plain": lambda: runner.launch(plain).outcome(), "control": lambda: lane.call(alone),
            "mixed": lambda: runner.launch(mixed).outcome(),
        }  # fmt: skip
        times = turns(contenders, options.rounds, lambda _, run: elapsed_ms(run, settle), record_all)
        same = [torch.equal(*(state.work.trajectory.x for state in two)) for two in zip(plain, mixed, strict=True)]
        return times, {"changed": not any(same), "side": pixels}
    finally:
        runner.close()


def _begun(runner: ImageRunner, kind: str, options: ControlStep, pixels: int) -> list[Request]:
    """Guided requests, which have been encoded: their steps come next."""
    requests = []
    for seed in range(options.rows // 2):
        parameters = ImageParameters("a hat", seed, pixels, pixels, steps=options.rounds + 2, guidance_scale=5.0)
        requests.append(Request(f"{kind} {seed}", "image", parameters))
        runner.admit(requests[-1])
    runner.launch(requests).outcome()
    return requests


@torch.inference_mode()
def _give(requests: Sequence[Request], branch: ControlBranch, pixels: int) -> None:
    """Let each of the requests have a picture of its own for this network, in all steps."""
    net, generator = branch.net, torch.Generator().manual_seed(0)
    network: ControlNetwork = Asset("control", 0, "", 0, branch)
    for request in requests:
        work: ImageState = request.work
        picture = torch.randint(0, 256, (1, pixels, pixels, 3), generator=generator, dtype=torch.uint8)
        hidden = torch.randn(work.rows, _TOKENS, net.config.cross_attention_dim, generator=generator)
        text = Conditioning({"kv": branch.prepare_text(hidden.to(net.device, net.dtype))}, 0.0)
        condition = Condition(branch.hint(picture), 1.0), (True,) * len(work.plan)
        controls = RequestControls((RequestControl(network, (condition,), {text.rows: text}),))
        work.extensions[FIELD] = ControlLease([], controls)


def _alone(model: ImageModel, branch: ControlBranch, requests: Sequence[Request]) -> Callable[[], Any]:
    """The network's forward for all rows of these requests' next step, on inputs that are gathered now."""
    states: list[ImageState] = [request.work for request in requests]
    gatherer = BatchGatherer(model.dtype, model.family.padded)
    present = [state.trajectory for state in states if state.trajectory is not None]
    rows = sum(state.rows for state in states)
    networks = [(state.extensions[FIELD].controls.networks[0], state.rows) for state in states]
    with torch.inference_mode():
        inputs = gatherer.inputs(present, rows)
        texts = gatherer.conditioning([control.texts[rows] for control, rows in networks], 0)
        moving = [branch.step_inputs(inputs.sample[:rows], control.conditions(0)) for control, rows in networks]
        merged = {**inputs.conditioning, **texts, "hint": torch.cat([entry["hint"] for entry in moving])}
    controlled = inputs._replace(sample=inputs.sample[:, : model.latent_channels], conditioning=merged)
    return torch.inference_mode()(lambda: branch(controlled))
