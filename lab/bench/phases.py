"""Measures each phase of a model at each width as a CUDA graph, to compare two versions of the code in one run.

    python -m lab.bench.phases [--family zimage|llama] [--stock] [--against old.json] [--tiles FILE] [--name phases]

Medians of windows of consecutive replays, on the fused lowering in INT8 (Z-Image and Llama-3.1-8B also in bf16).
Weights are random: speeds are real, images and texts are not. `--stock` also times diffusers' denoiser, eager and
compiled; `--against` gives the ratio of each phase to that in an earlier file, or to the median of several. `--tiles`,
of a table of tiles or "estimate", measures each phase with these too, in turns with the device's own. `--device cpu
--tiny` rehearses it.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contract.plan import BLOCK, DEPTHS
from core.kernels.cuda import tiles
from core.kernels.kv_cache import TokenBatch
from core.ops.cuda import CudaLowering
from core.ops.reference import TorchLowering
from core.quant.convert import quantize_
from core.quant.statistics import Statistics
from lab.bench.harness import command, models, record
from lab.bench.harness.timing import window_ms
from llm.backends.select import select
from llm.cache.pages import PAGE
from llm.checkpoints.load import load as load_text
from llm.checkpoints.quantized import quantize as quantize_text
from llm.families import tiny as tiny_llama
from pipeline.backends.phases import on_gpu
from pipeline.checkpoints import sdxl, tiny, tiny_zimage
from pipeline.families.sdxl.conditioning import embed
from pipeline.families.sdxl.parts import tokenizers
from pipeline.families.zimage import recipe
from pipeline.families.zimage.transformer import ZImageNetwork
from unet_opt.deepcache import select_features
from unet_opt.inputs import DenoiserInputs
from unet_opt.vae import VaeDecoder

ROWS = (16, 14, 12, 8, 4, 2)
STOCK_ROWS = (16, 2)
ZIMAGE_ROWS, TOKENS = (1, 2, 4, 8), 96
ZIMAGE_VAE: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
    "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip

Phases = Iterator[tuple[str, Callable[[], Any], bool]]
"""Name and rows of a phase, its call, and whether it is recorded as a graph."""


def sdxl_phases(device: str, *, small: bool, stock: bool) -> Phases:
    """Phases of SDXL's UNet, decoder and text encoders in INT8."""
    source = models.model(tiny.TINY if small else sdxl.NAME, device)
    model = models.variant(source, "int8", models.ranges(source, 1))
    rows = (2, 1) if small else ROWS
    unet, decoder, _, _ = on_gpu(model, max(rows))
    for count in rows:
        sample, times, text, added = models.inputs(source, count)
        inputs = models.of_denoiser(sample, times, unet.prepare_text(text), added)
        _, *features = unet.deep(inputs)
        yield f"deep {count}", partial(unet.deep, inputs), True
        for depth in DEPTHS:
            parts = tuple(part.clone() for part in select_features(features, depth))
            shallow = partial(unet.shallow, depth, inputs.without_text(), parts)
            yield f"shallow{'' if depth == BLOCK else f'-{depth}'} {count}", shallow, True
    text = models.inputs(source, 2)[2]
    yield "keys 2", partial(unet.prepare_text, text), True
    for count in (1, 2) if small else (1, 2, 4):
        latents = torch.randn(count, model.latent_channels, *sample.shape[2:], device=device)
        yield f"vae {count}", partial(decoder, latents), True
    ids = [torch.zeros(2, t.model_max_length, dtype=torch.long, device=device) for t in tokenizers(model)]
    yield "text 2", lambda: embed(model, ids), True
    if stock:
        yield from stock_sdxl(source.denoiser, [(count, models.inputs(source, count)) for count in STOCK_ROWS])


def stock_sdxl(unet: Any, steps: Sequence[tuple[int, Any]]) -> Phases:
    """Forwards of diffusers' UNet."""
    for name, forward in (("diffusers", unet), ("diffusers compiled", torch.compile(unet, dynamic=False))):
        for count, (sample, times, text, added) in steps:

            def run(forward: Any = forward, arguments: Any = (sample, times, text), added: Any = added) -> Any:
                return forward(*arguments, added_cond_kwargs=added, return_dict=False)[0]

            run()
            yield f"{name} deep {count}", run, False


def zimage_phases(device: str, *, small: bool, stock: bool) -> Phases:
    """Phases of Z-Image's transformer in bf16 and INT8, and its decoder, at 1024×1024 with 96 text tokens."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel

    shape, dtype = tiny_zimage.ZImageShape(), torch.bfloat16 if device == "cuda" else torch.float32
    rows, side = ((1, 2), 8) if small else (ZIMAGE_ROWS, 128)
    torch.manual_seed(0)
    with torch.device(device):  # diffusers' defaults are Z-Image's
        model: Any = ZImageTransformer2DModel(**(shape.transformer() if small else {}))
        vae: Any = AutoencoderKL(**(shape.vae() if small else ZIMAGE_VAE))
    model, vae = (part.to(dtype).eval().requires_grad_(False) for part in (model, vae))
    hidden = torch.randn(1, TOKENS, model.config.cap_feat_dim, device=device, dtype=dtype)

    def inputs(count: int) -> tuple[Tensor, Tensor]:
        latents = torch.randn(count, model.in_channels, side, side, device=device, dtype=dtype)
        return latents, torch.linspace(0.1, 0.9, count, device=device)

    for name, denoiser in (("bf16", model), ("int8", _in_8_bits(model, hidden, inputs(1), dtype))):
        network = ZImageNetwork(CudaLowering(dtype, max(rows)), denoiser)
        text = network.prepare_text(hidden)
        for count in rows:
            lengths = torch.full((count,), TOKENS, device=device)
            texts = {"text": text.expand(count, -1, -1).contiguous(), "lengths": lengths}
            phase_inputs = DenoiserInputs(*inputs(count), texts)
            features = network.deep(phase_inputs)[1].clone()
            yield f"{name} deep {count}", partial(network.deep, phase_inputs), True
            yield f"{name} shallow {count}", partial(network.shallow, BLOCK, phase_inputs, (features,)), True
    decoder = VaeDecoder(CudaLowering(dtype, 1), vae)
    latents = torch.randn(1, vae.config.latent_channels, side, side, device=device, dtype=dtype)
    yield "vae 1", lambda: decoder(latents), True
    if stock:
        yield "diffusers vae 1", lambda: vae.decode(latents, return_dict=False), False
        for name in ("diffusers", "diffusers compiled"):
            if name != "diffusers":
                model.compile_repeated_blocks(fullgraph=True)
            for count in (rows[0], rows[-2]):
                images, times = inputs(count)
                arguments = [*images.unsqueeze(2).unbind(0)], times, [hidden[0]] * count
                model(*arguments, return_dict=False)
                yield f"{name} deep {count}", partial(model, *arguments, return_dict=False), False


def _in_8_bits(model: Any, hidden: Tensor, tensors: tuple[Tensor, Tensor], dtype: torch.dtype) -> Any:
    """The transformer in INT8, calibrated on one step; what is not quantized is shared."""
    rules, seen = recipe.transformer(model), Statistics("random")
    reference = ZImageNetwork(TorchLowering(dtype), model)
    text, lengths = reference.prepare_text(hidden), torch.full((1,), TOKENS, device=hidden.device)
    with seen.observe(model, rules.targets(model), 0):
        reference.deep(DenoiserInputs(*tensors, {"text": text, "lengths": lengths}))
    quantized = copy.deepcopy(model)
    quantize_(quantized, rules, seen)
    return quantized


def llama_phases(device: str, *, small: bool, stock: bool) -> Phases:
    """Decode steps of static batches, and one prompt, with keys and values in the type of the weights."""
    cuda, name = device == "cuda", tiny_llama.TINY if small else tiny_llama.LLAMA_8B
    model = load_text(name, precision="bf16" if cuda else "fp32", device=device)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, model.vocabulary, (256,), generator=draw).tolist() for _ in range(4)]
    variants: dict[str, Any] = {"bf16": model} | ({"int8": quantize_text(model, prompts)} if cuda else {})
    batches = (2,) if small else (1, 64, 256)
    for (kind, variant), batch, context in itertools.product(variants.items(), batches, (192, 1500)):
        pages = -(-context // PAGE)
        if kind == "bf16" and batch * context > 100_000:
            continue  # 131 kB a token
        run = select(variant, pages=pages * batch, sequences=batch, context=context, rows=max(batch, context),
                     kv="int8" if kind == "int8" else "float")  # fmt: skip
        for row in range(batch):
            run.cache.place(row, list(range(row * pages, (row + 1) * pages)))
        rows = list(range(batch))
        step = TokenBatch.of([3 + row for row in rows], [context - 1] * batch, rows, rows)
        run.forward(step)
        graphs = run.step_graphs
        replay = partial(run.forward, step) if graphs is None else next(reversed(graphs._graphs.values()))
        yield f"{kind} step {batch} × {context}", replay, False
        if batch == 1:
            tokens = (prompts[0] * 6)[:context]
            chunk = TokenBatch.of(tokens, list(range(context)), [0] * context, [context - 1])
            yield f"{kind} prompt {context}", partial(run.forward, chunk), False


def _milliseconds(file: Path) -> dict[str, float]:
    """Milliseconds by phase; versions before had nothing else in their files."""
    content: dict[str, Any] = json.loads(file.read_text())
    times: dict[str, float] = content.get("ms", content)
    return times


FAMILIES = {"sdxl": sdxl_phases, "zimage": zimage_phases, "llama": llama_phases}


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser("phases", __doc__)
    parser.add_argument("--family", choices=FAMILIES, default="sdxl", help="default: %(default)s")
    parser.add_argument("--stock", action="store_true", help="also diffusers' denoiser")
    parser.add_argument(
        "--against", type=Path, action="append", default=[], metavar="FILE", help="an earlier file of the same family"
    )
    parser.add_argument("--against-name", default="", help="of what the earlier files measured, such as a commit")
    parser.add_argument(
        "--tiles", action="append", default=[], metavar="FILE", help="with these tiles too: a table, or `estimate`"
    )
    parser.add_argument("--name", default="phases", help="of the file of results; default: %(default)s")
    options = parser.parse_args(arguments)
    earlier = [_milliseconds(file) for file in options.against]
    before = {
        name: statistics.median(times[name] for times in earlier if name in times)
        for name in dict.fromkeys(itertools.chain.from_iterable(earlier))
    }
    times: dict[str, float] = {}
    others: dict[str, dict[str, float]] = {Path(table).stem: {} for table in options.tiles}
    tables = {Path(table).stem: {} if table == "estimate" else tiles.read(Path(table)) for table in options.tiles}
    for name, run, graph in FAMILIES[options.family](options.device, small=options.tiny, stock=options.stock):
        times[name] = window_ms(run, graph=graph)
        for label, table in tables.items():
            with tiles.using(table):
                others[label][name] = window_ms(run, graph=graph)
        compared = "".join(f", {label} {other[name]:.3f}" for label, other in others.items())
        record.progress(f"{name}: {times[name]:.3f} ms{compared}")
    rows = [
        (name, f"{ms:.3f}", f"{ms / before[name]:.3f}" if name in before else None,
         *(f"{other[name]:.3f}" for other in others.values()))
        for name, ms in times.items()
    ]  # fmt: skip
    record.table(options.family, ("phase", "ms", "ratio", *others), rows)
    extra: dict[str, Any] = {"tiles": others} if others else {}
    if before:
        extra |= {"before": options.against_name, "before_ms": before}
    record.publish(options.name, {"family": options.family, "ms": times, **extra}, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
