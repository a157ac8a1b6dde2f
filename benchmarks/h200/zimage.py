"""Measures Z-Image's shape with seeded weights beside diffusers, eager and compiled, in one run.

    python -m benchmarks.h200.zimage [part ...] [--out zimage.json] [--tiny]

One denoising step and the VAE at several widths, as CUDA graphs of the fused lowering in bf16 and INT8, and diffusers'
transformer on the same weights. A picture is 8 steps without guidance and one decode, at 1024×1024 with 96 text tokens.
Prompts are encoded once a request and not counted: the part "text" times that, on Qwen3-4B's shape by transformers and
by the fused lowering in bf16 and INT8. `--tiny` rehearses on any device.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.h200.timing import sustained, table
from core.cuda_graphs import CapturedGraph, CudaRecorder
from core.ops.cuda import CudaLowering
from core.ops.reference import TorchLowering
from core.quant.convert import quantize_
from core.quant.statistics import Statistics
from llm.encoder import PromptEncoder
from llm.recipe import llama
from pipeline import tiny_zimage
from pipeline.families.zimage import recipe
from pipeline.families.zimage.transformer import ZImageNetwork
from unet_opt.vae import VaeDecoder

STEPS, TOKENS = 8, 96
TRANSFORMER: dict[str, Any] = {}  # diffusers' defaults are Z-Image's
TEXT: dict[str, Any] = {  # Qwen3-4B
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


class Bench:
    """The models on one device, and what their inputs are."""

    def __init__(self, tiny: bool) -> None:
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
        from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel

        self.tiny, self.cuda = tiny, torch.cuda.is_available()
        self.device, self.dtype = ("cuda", torch.bfloat16) if self.cuda else ("cpu", torch.float32)
        shape = tiny_zimage.ZImageShape()
        self.side = 8 if tiny else 128
        self.rows = (1, 2) if tiny else (1, 2, 4, 8)
        with torch.device(self.device):
            torch.manual_seed(0)
            self.model = ZImageTransformer2DModel(**(shape.transformer() if tiny else TRANSFORMER))
            self.vae = AutoencoderKL(**(shape.vae() if tiny else VAE))
        self.model = self.model.to(self.dtype).eval().requires_grad_(False)
        self.vae = self.vae.to(self.dtype).eval().requires_grad_(False)

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

    def inputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """Latents and times."""
        times = torch.linspace(0.1, 0.9, rows, device=self.device)
        return self.random(rows, self.model.in_channels, self.side, self.side), times

    def measured(self, run: Callable[[], Any], *, graph: bool = True) -> float:
        """Milliseconds: the median over windows of consecutive runs."""
        if not self.cuda:
            started = time.perf_counter()
            run()
            return 1000 * (time.perf_counter() - started)
        ready = CapturedGraph(run, (), {}, CudaRecorder(torch.device("cuda"))) if graph else run
        once = sustained(ready, 2)
        return statistics.median(sustained(ready, max(2, round(400 / once))) for _ in range(3))


def ours(bench: Bench, model: Any, found: dict[str, float], name: str) -> None:
    """Steps of the fused lowering, whole and on cached features."""
    network = ZImageNetwork(CudaLowering(bench.dtype, max(bench.rows)), model)
    text = network.prepare_text(bench.random(1, TOKENS, model.config.cap_feat_dim))
    for rows in bench.rows:
        sample, times = bench.inputs(rows)
        texts, lengths = text.expand(rows, -1, -1).contiguous(), torch.full((rows,), TOKENS, device=bench.device)
        _, rest = network.deep(sample, times, text=texts, lengths=lengths)
        kept = rest.clone()
        found[f"{name} deep {rows}"] = bench.measured(
            lambda: network.deep(sample, times, text=texts, lengths=lengths)  # noqa: B023
        )
        found[f"{name} shallow {rows}"] = bench.measured(
            lambda: network.shallow("block", (kept,), sample, times, text=texts, lengths=lengths)  # noqa: B023
        )
        print(name, rows, found[f"{name} deep {rows}"], found[f"{name} shallow {rows}"], flush=True)


def stock(bench: Bench, found: dict[str, float], name: str, *, compiled: bool) -> None:
    """diffusers' transformer, whole batches of one length."""
    model: Any = bench.model
    if compiled:
        model.compile_repeated_blocks(fullgraph=True)
    for rows in (bench.rows[0], bench.rows[-2]):
        sample, times = bench.inputs(rows)
        texts = [bench.random(TOKENS, model.config.cap_feat_dim)] * rows
        images = list(sample.unsqueeze(2).unbind(0))

        def run(images: list[Tensor] = images, times: Tensor = times, texts: list[Tensor] = texts) -> Any:
            return model(images, times, texts, return_dict=False)[0]

        for _ in range(2):
            run()
        found[f"{name} deep {rows}"] = bench.measured(run, graph=False)
        print(name, rows, found[f"{name} deep {rows}"], flush=True)


def in_8_bits(bench: Bench) -> Any:
    """The transformer in INT8, calibrated on one step; what is not quantized is shared."""
    made, statistics_ = recipe.transformer(), Statistics("random")
    layers = made.targets(bench.model)
    reference = ZImageNetwork(TorchLowering(bench.dtype), bench.model)
    text = reference.prepare_text(bench.random(1, TOKENS, bench.model.config.cap_feat_dim))
    sample, times = bench.inputs(1)
    with statistics_.observe(bench.model, layers, 0):
        wanted = reference.deep(sample, times, text=text, lengths=torch.full((1,), TOKENS, device=bench.device))[0]
    model = copy.deepcopy(bench.model)
    quantize_(model, made, statistics_)
    found = ZImageNetwork(CudaLowering(bench.dtype, 1), model).deep(
        sample, times, text=text, lengths=torch.full((1,), TOKENS, device=bench.device)
    )[0]
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    print(f"int8: relative error of one step {float(error):.4f} (random weights)", flush=True)
    return model


def text(bench: Bench, found: dict[str, float]) -> None:
    """One prompt through the text encoder: as it is served, launched layer by layer, and as a graph."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    shape = tiny_zimage.ZImageShape().text(512, 0) if bench.tiny else TEXT
    usual = torch.get_default_dtype()
    torch.set_default_dtype(bench.dtype)
    try:
        with torch.device(bench.device):
            network: Any = Qwen3Model(Qwen3Config(**shape)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)
    generator = torch.Generator().manual_seed(0)
    prompts = {n: torch.randint(0, shape["vocab_size"] - 3, (n,), generator=generator).tolist() for n in (96, 512)}

    def stock(ids: list[int], network: Any = network) -> Tensor:
        tokens = torch.tensor([ids], device=bench.device)
        hidden: Tensor = network(tokens, output_hidden_states=True, use_cache=False).hidden_states[-2][0]
        return hidden

    made, seen = llama(), Statistics("random")
    with seen.observe(network, made.targets(network), 0):
        wanted = {n: stock(ids) for n, ids in prompts.items()}
    quantized = copy.deepcopy(network)
    quantize_(quantized, made, seen)
    for name, one in (("transformers bf16", None), ("bf16", network), ("int8", quantized)):
        encoder = None if one is None else PromptEncoder(CudaLowering(bench.dtype, 1), one)
        for n, ids in prompts.items():
            run = partial(stock, ids) if encoder is None else partial(encoder, [ids])
            for _ in range(2):
                run()
            found[f"text {name} {n}"] = bench.measured(run, graph=False)
            if encoder is not None:
                states, tokens = encoder([ids])[0], torch.tensor([ids], device=bench.device, dtype=torch.int32)
                counts = torch.full((1,), n, device=bench.device, dtype=torch.int32)
                found[f"text {name} {n} graph"] = bench.measured(partial(encoder.states, tokens, counts))
                error = (states.float() - wanted[n].float()).norm() / wanted[n].float().norm()
                found[f"text {name} {n} relative error"] = float(error)
        if one is not None:
            layers = sum(t.numel() * t.itemsize for t in (*one.layers.parameters(), *one.layers.buffers()))
            found[f"text {name} GiB of layers"] = layers / 2**30


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="vae, diffusers, bf16, int8, diffusers-compiled, text (default: all)")
    parser.add_argument("--out", type=Path, default=Path("zimage.json"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    bench, found = Bench(options.tiny), dict[str, float]()
    parts: dict[str, Callable[[], None]] = {
        "vae": lambda: vae(bench, found),
        "diffusers": lambda: stock(bench, found, "diffusers", compiled=False),
        "bf16": lambda: ours(bench, bench.model, found, "bf16"),
        "int8": lambda: ours(bench, in_8_bits(bench), found, "int8"),
        "diffusers-compiled": lambda: stock(bench, found, "diffusers compiled", compiled=True),
        "text": lambda: text(bench, found),
    }
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    for name in options.parts or parts:  # one that fails leaves the others
        try:
            parts[name]()
        except Exception:
            print(name, "failed:", traceback.format_exc()[-1500:], flush=True)
        if bench.cuda:
            found[f"{name} peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.empty_cache()
        options.out.write_text(json.dumps(found, indent=1))
    report(found)


def vae(bench: Bench, found: dict[str, float]) -> None:
    """One decode at a time, and diffusers'."""
    decoder = VaeDecoder(CudaLowering(bench.dtype, 1), bench.vae)
    latents = bench.random(1, bench.vae.config.latent_channels, bench.side, bench.side)
    found["vae 1"] = bench.measured(lambda: decoder(latents))
    found["diffusers vae 1"] = bench.measured(lambda: bench.vae.decode(latents, return_dict=False), graph=False)


def report(found: dict[str, float]) -> None:
    """Every figure, and pictures a second: rows / (8 steps + one decode each)."""
    table(("", "value"), [(name, f"{value:.4g}") for name, value in found.items()])
    lines = []
    for name, ms in found.items():
        if " deep " in name:
            decode = found.get("diffusers vae 1" if name.startswith("diffusers") else "vae 1", 0.0)
            rows = int(name.split()[-1])
            lines.append((name, f"{1000 * rows / (STEPS * ms + rows * decode):.3f}", f"{STEPS * ms + decode:.0f}"))
    table(("", "pictures/s", "ms alone"), lines)


if __name__ == "__main__":
    main()
