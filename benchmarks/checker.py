"""Measures what a checker of contents costs: `python -m benchmarks.checker [--pictures 30] [--device cpu]`.

A safety checker in the shape of CLIP ViT-L/14, as published with Stable Diffusion, and a classifier in that of
ViT-B/16, both with random weights, look at the same pictures one after another: smooth colours with noise. On a CPU
seconds are those of its processors, on one thread, which other processes hardly change; on a GPU those that pass.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import record
from benchmarks.marks import pictures
from pipeline import content

_SIDE = 224
_PATCHES = {"safety checker, ViT-L/14": 14, "classifier, ViT-B/16": 16}


def save(folder: Path, patch: int) -> None:
    """Save the network whose patches are so large, and its image processor."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, ViTConfig, ViTForImageClassification
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    if patch == 16:
        ViTForImageClassification(ViTConfig(id2label={0: "normal", 1: "nsfw"})).save_pretrained(folder)
        ViTImageProcessorPil().save_pretrained(folder)
        return
    vision = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "patch_size": patch, "image_size": _SIDE, "projection_dim": 768,
    }  # fmt: skip
    StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, projection_dim=768)).save_pretrained(folder)
    CLIPImageProcessorPil().save_pretrained(folder)


def run(options: argparse.Namespace) -> dict[str, Any]:
    networks = {}
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="diptych-checker-") as folder, record.alone():
        for name, patch in _PATCHES.items():
            save(Path(folder) / str(patch), patch)
            network = content.load(Path(folder) / str(patch), torch.device(options.device), {})
            seconds: dict[str, list[float]] = {"prepare": [], "judge": []}
            for picture in pictures(options.pictures, options.side):
                started = clock()
                pixels = network.prepare(picture.image)[None]
                prepared = clock()
                network.verdicts(pixels)
                seconds["prepare"].append(prepared - started)
                seconds["judge"].append(clock() - prepared)
            networks[name] = {part: round(1e3 * statistics.median(values), 1) for part, values in seconds.items()}
    result = {"pictures": options.pictures, "side": options.side}
    return record.publish("checker", {**result, "device": options.device, "networks": networks}, options.results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checker", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--side", type=int, default=1024, help="of a picture, in pixels; default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--results", "--out", type=Path, default=record.RESULTS, metavar="DIR", help="where the JSON goes"
    )
    result = run(parser.parse_args(arguments))
    rows = [(name, figures["prepare"], figures["judge"]) for name, figures in result["networks"].items()]
    record.table(f"{result['pictures']} pictures, {result['side']}²", ("network", "prepare, ms", "judge, ms"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
