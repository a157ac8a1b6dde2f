"""Compares the fused layers with diffusers in bf16, by layer, forward and image, and tests batch invariance.

    python -m benchmarks.h200.numerics [--model NAME] [--kinds bf16,int8,fp8] [--pictures FILE.png] [--out folder]

With trained weights (`--model stabilityai/stable-diffusion-xl-base-1.0`) this is the first half of the check; the
second are MLPerf's gates: `diptych evaluate --protocol mlperf` (docs/evaluation.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import provenance, record
from benchmarks.h200 import sources
from benchmarks.h200.timing import table
from contract.image import ImageParameters
from contract.plan import AUTO, DEPTHS, DeepCache
from contract.precision import Scheme
from core.batching.engine import Engine
from core.batching.request import Request
from core.quant.linear import ScaledWeights
from pipeline import sdxl
from pipeline.backends.backend import Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.drawing import Denoiser
from pipeline.load import ImageModel
from pipeline.phases import on_gpu, on_torch
from pipeline.runner import ImageRunner
from unet_opt.deepcache import kept

KINDS: dict[str, Scheme | None] = {"bf16": None, "int8": "int8", "fp8": "fp8"}


def agreement(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """Cosine, and PSNR in dB with the reference's range as the peak."""
    a, e = actual.double().flatten(), expected.double().flatten()
    error = (a - e).square().mean()
    peak = (e.max() - e.min()).square()
    return {
        "cosine": round(float(torch.dot(a, e) / a.norm() / e.norm()), 6),
        "psnr_db": round(float(10 * torch.log10(peak / error.clamp(min=1e-30))), 2),
        "std": round(float(a.std()), 4),
        "finite": float(torch.isfinite(a).all()),
    }


def layers(source: ImageModel, variant: ImageModel) -> dict[str, Any]:
    """Cosine of each quantized layer's output with the bf16 layer's, on the stock UNet's inputs."""
    names = [n for n, m in variant.denoiser.named_modules() if isinstance(m, ScaledWeights)]
    cosines: dict[str, float] = {}
    hooks = []

    def watch(name: str, other: nn.Module) -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            made = other(given[0].float())
            cosines[name] = agreement(made, out)["cosine"]

        return hook

    for name in names:
        layer = source.denoiser.get_submodule(name)
        hooks.append(layer.register_forward_hook(watch(name, variant.denoiser.get_submodule(name))))
    sources.stock(source.denoiser, sources.inputs(source, 2, seed=11))
    for hook in hooks:
        hook.remove()
    worst = sorted(cosines.items(), key=lambda item: item[1])[:5]
    return {"layers": len(cosines), "median_cosine": statistics.median(cosines.values()), "worst": worst}


def company(variant: ImageModel, cached: DeepCache | None) -> dict[str, Any]:
    """Whether a deterministic request has equal pixels alone and among requests that join meanwhile."""
    runner = ImageRunner(GraphBackend(variant, Widths(16, 8, (2, 4, 8, 16))))
    side = variant.native

    def wanted(seed: int, steps: int, deterministic: bool) -> ImageParameters:
        prompt = f"picture {seed} of a small red boat"
        return ImageParameters(prompt, seed, side, side, steps=steps, deterministic=deterministic, deepcache=cached)

    with Engine([runner]) as engine:
        one = wanted(1, 8, deterministic=True)
        loose = wanted(1, 8, deterministic=False)
        alone, alone_loose = (
            engine.submit(Request(f"alone-{i}", "image", w)).result().image for i, w in enumerate((one, loose))
        )
        futures = [
            engine.submit(Request(f"other-{i}", "image", wanted(i + 2, 5 + i, deterministic=i % 2 == 0)))
            for i in range(5)
        ]
        among = [engine.submit(Request(f"among-{i}", "image", w)) for i, w in enumerate((one, loose))]
        found, found_loose = (future.result().image for future in among)
        for future in futures:
            future.result()
    runner.close()
    return {
        "deterministic_equal": found.tobytes() == alone.tobytes(),
        "not_asked_equal": found_loose.tobytes() == alone_loose.tobytes(),
        "pixel_spread": len(set(found.tobytes())),
    }


def drawn(variant: ImageModel, prompts: Sequence[str], cached: DeepCache | None) -> list[Any]:
    """Images of the prompts from the engine, all in flight at once."""
    runner = ImageRunner(GraphBackend(variant, Widths(16, 8, (2, 4, 8, 16))))
    side = variant.native
    with Engine([runner]) as engine:
        futures = [
            engine.submit(Request(str(i), "image", ImageParameters(prompt, i, side, side, deepcache=cached)))
            for i, prompt in enumerate(prompts)
        ]
        made = [future.result().image for future in futures]
    runner.close()
    return made


def grid(rows: Sequence[Sequence[Any]], file: Path) -> None:
    """Save images of equal size side by side."""
    from PIL import Image

    side = rows[0][0].width
    whole = Image.new("RGB", (side * len(rows[0]), side * len(rows)))
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            whole.paste(picture, (x * side, y * side))
    whole.save(file)


@torch.inference_mode()
def check(source: ImageModel, kinds: list[str], prompts: Sequence[str], pictures: Path | None) -> dict[str, Any]:
    found = sources.ranges(source)
    given = sources.inputs(source, 4)
    expected = sources.stock(source.denoiser, given)
    drawing = Denoiser(source, on_torch(source).denoiser, guidance=sources.GUIDANCE, steps=sources.STEPS)
    seeds = range(len(sources.PROMPTS))
    twenty = drawing.latents(sources.PROMPTS, seeds)
    pixels = source.vae.decode((twenty[:1] / source.vae.config.scaling_factor).to(torch.bfloat16), return_dict=False)[0]
    results: dict[str, Any] = {}
    rows: list[list[Any]] = []
    for name in kinds:
        variant = sources.variant(source, KINDS[name], found)
        result: dict[str, Any] = {}
        if KINDS[name] is not None:
            result["layers"] = layers(source, variant)
        unet, decoder, _, _ = on_gpu(variant, 16)
        kv = unet.prepare_text(given["text"])
        out, *features = sources.fused(unet, given, kv)
        result["forward"] = agreement(out, expected)
        for depth in DEPTHS:  # a shallow step on the features of the same input is the deep one again
            own = tuple(part.clone() for part in kept(features, depth))
            conditions = {"text_embeds": given["pooled"], "time_ids": given["ids"].to(torch.bfloat16)}
            (again,) = unet.shallow(
                depth, own, given["latents"].to(torch.bfloat16), given["timestep"], added_cond_kwargs=conditions
            )
            result[f"shallow {depth}"] = agreement(again, out)["psnr_db"]
        same = Denoiser(variant, unet, guidance=sources.GUIDANCE, steps=sources.STEPS)
        result["twenty_steps"] = agreement(same.latents(sources.PROMPTS, seeds), twenty)
        made = decoder(twenty[:1] / source.vae.config.scaling_factor).permute(0, 3, 1, 2)
        result["vae"] = agreement(made.clamp(-1, 1), pixels.clamp(-1, 1))
        del unet, decoder
        results[name] = result
        print(name, json.dumps(result), flush=True)
        if pictures is not None:
            rows += [drawn(variant, prompts, cached) for cached in (None, AUTO)]
            exact = np.stack([np.asarray(picture, dtype=float) for picture in rows[0]])
            for which, row in zip(("pictures", "pictures+deepcache"), rows[-2:], strict=True):
                error = np.square(np.stack([np.asarray(picture, dtype=float) for picture in row]) - exact).mean()
                result[which] = {"psnr_db": round(float(10 * np.log10(255**2 / max(error, 1e-9))), 2)}
            grid(rows, pictures)
            print(name, result["pictures"], result["pictures+deepcache"], flush=True)
        if name != "bf16":
            result["company"] = company(variant, DeepCache(2, "resnet"))
            print(name, result["company"], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=sdxl.NAME)
    parser.add_argument("--pictures", type=Path, help="where to save what each kind draws, without and with DeepCache")
    parser.add_argument("--prompts", nargs="+", default=sources.PROMPTS)
    parser.add_argument("--kinds", default="bf16,int8,fp8")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/h200/results"))
    options = parser.parse_args()
    results = check(sources.model(options.model), options.kinds.split(","), options.prompts, options.pictures)
    rooms = (*provenance.GPU_IMAGES, *(f"benchmarks/h200/{name}.py" for name in ("numerics", "sources")))
    name = "numerics" if options.model == sdxl.NAME else f"numerics-{Path(options.model).name}"
    record.write(name, {"model": options.model, **results}, options.out, rooms=rooms)
    table(
        ("beside diffusers in bf16", "forward", "20 steps", "vae"),
        [
            (
                name,
                *(
                    f"{r[part]['cosine']:.5f}, {r[part]['psnr_db']:.1f} dB"
                    for part in ("forward", "twenty_steps", "vae")
                ),
            )
            for name, r in results.items()
        ],
    )


if __name__ == "__main__":
    main()
