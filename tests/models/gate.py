"""Quality of the embedded models' 8-bit and cached ways to draw, beside stored figures: `python -m tests.models.gate`.

64 pictures, chosen by rule: the animals of Unicode, U+1F400 to U+1F43F, by their names. Each is drawn in fp32 and in
another way from the same seed. Figures are of the first 6, which `make test` draws, of 12, and of all. `--write` stores
them, after a change that is meant to change them. `--linears` tries a scheme of 4 bits on the INT8 denoiser's linear
layers, and says which of INT8's figures it falls below.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from contract.image import ImageParameters
from contract.plan import AUTO
from core.batching.runner import Lane
from core.quant.convert import swap_
from core.quant.int4 import FourBitLinear
from core.quant.linear import Int8Linear
from core.quant.schemes import SCHEMES
from core.quant.w4a8 import in_int8
from evaluation.clip import Clip
from pipeline.checkpoints.load import ImageModel, load
from tests.core.quant.stage import kernels
from tests.pipeline.worlds import Crank, Watching, levels, psnr

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).with_name("quality.json")
NAMES = tuple(unicodedata.name(chr(code)).lower() for code in range(0x1F400, 0x1F440))
FEW = 6  # pictures that `make test` draws
COUNTS = (FEW, 12, len(NAMES))  # of which figures are stored; docs/quantize.md compares 12
SIDE = 128
STEPS = {"emoji-xl": 10, "emoji-z": 8}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {}),
    "int8-auto": ("int8", {"deepcache": AUTO}),
    "int8-half-guided": ("int8", {"guidance_interval": (0.0, 0.5)}),
}
# How far below the stored figures a way may be: between processors with AVX2 and with AVX-512 the means differ by up to
# 0.22 dB, the worst pictures by 0.32 dB, and the scores by 0.2%.
MEAN_DB, WORST_DB, SCORE = 0.5, 1.5, 0.006

Pictures = list[np.ndarray[Any, Any]]
Figures = dict[str, float]


class Fall(NamedTuple):
    """A figure that is too low."""

    figure: str
    found: float
    least: float


def ways(name: str) -> tuple[str, ...]:
    """The ways to draw of a model; emoji-z is drawn without guidance."""
    return tuple(WAYS) if name == "emoji-xl" else ("int8", "int8-auto")


def draw(model: ImageModel, count: int, **options: Any) -> Pictures:
    """The first so many pictures, [H, W, 3] in levels, on the CPU's kernels."""
    crank, name = Crank(Watching(model, lane=Lane("gate"), kernels=kernels(), max_requests=32)), Path(model.name).name
    defaults = model.defaults
    for seed, prompt in enumerate(NAMES[:count]):
        wanted = ImageParameters(
            prompt, seed, SIDE, SIDE, steps=STEPS[name], guidance_scale=defaults.guidance_scale, **options
        )
        crank.submit(prompt, wanted)
    found = crank.pictures()
    return [levels(found[prompt]) for prompt in NAMES[:count]]


def compare(whole: Pictures, others: Pictures, clip: Clip) -> Figures:
    """PSNR in dB of the pictures beside those of fp32, and the ratio of their mean scores."""
    ratios = [psnr(a, b) for a, b in zip(whole, others, strict=True)]
    texts = clip.read(NAMES[: len(whole)])
    scores = [
        float((clip.see([picture.astype(np.uint8) for picture in each]) * texts).sum(1).mean())
        for each in (whole, others)
    ]
    return {"mean_db": sum(ratios) / len(ratios), "worst_db": min(ratios), "score": scores[1] / scores[0]}


def falls(found: Mapping[str, float], stored: Mapping[str, float]) -> list[Fall]:
    """What has become worse."""
    slack = {"mean_db": MEAN_DB, "worst_db": WORST_DB, "score": SCORE}
    least = {name: stored[name] - slack[name] for name in slack}
    return [Fall(name, found[name], least[name]) for name in slack if not found[name] >= least[name]]


def draw_way(name: str, way: str, count: int, change: Callable[[Any], None] | None = None) -> Pictures:
    """The first so many pictures drawn in one way, after a `change` of the loaded model's denoiser."""
    precision, options = WAYS[way]
    model = load(str(ROOT / "models" / name), precision=precision)
    if change is not None:
        change(model.denoiser)
    return draw(model, count, **options)


def in_4_bits(plain: Any, scheme: str) -> Callable[[Any], None]:
    """Replace the INT8 linear layers of a denoiser by those of `plain`, the same in floats, in this scheme."""

    def change(denoiser: Any) -> None:
        replacements: dict[str, nn.Module] = {}
        for name, eight in denoiser.named_modules():
            if not isinstance(eight, Int8Linear):
                continue
            layer, kind = plain.get_submodule(name), SCHEMES[scheme].linear
            four = kind.of(layer, eight.inverse if kind.ROUNDS else None)
            replacements[name] = in_int8(four)
            if isinstance(four, FourBitLinear) and not kind.ROUNDS:  # the CPU's kernels have plain layers for these
                replacements[name] = floats = nn.Linear(layer.in_features, layer.out_features).requires_grad_(False)
                floats.weight, floats.bias = nn.Parameter(four.dense(), False), layer.bias
        swap_(denoiser, replacements)

    return change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="store the figures")
    parser.add_argument("--count", type=int, choices=COUNTS, help="of the first so many alone")
    parser.add_argument("--linears", choices=("w4a16", "w4a8", "nvfp4"), help="try this scheme, and store nothing")
    options = parser.parse_args()
    counts = [options.count] if options.count else COUNTS
    clip, stored = Clip(), json.loads(STORED.read_text("utf-8"))
    for name in STEPS:
        model = load(str(ROOT / "models" / name))
        whole = draw(model, max(counts))
        if options.linears is not None:
            others = draw_way(name, "int8", max(counts), in_4_bits(model.denoiser, options.linears))
            for count in counts:
                found = compare(whole[:count], others[:count], clip)
                below = [fall.figure for fall in falls(found, stored[str(count)][name]["int8"])]
                print(name, options.linears, count, found, "below INT8's:", ", ".join(below) or "nothing", flush=True)
            continue
        for way in ways(name):
            others = draw_way(name, way, max(counts))
            for count in counts:
                found = compare(whole[:count], others[:count], clip)
                stored[str(count)][name][way] = {key: round(value, 4) for key, value in found.items()}
                print(name, way, count, stored[str(count)][name][way], flush=True)
    if options.write:
        STORED.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
