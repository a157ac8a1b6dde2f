"""Draws images with OpenVINO's pipelines, in a process of `lab.bench.rivals` and with an interpreter of its own.

It answers the requests of `lab.bench.rungs` and imports nothing of this project: optimum-intel needs other versions of
transformers and diffusers. `lab/bench/openvino.txt` lists what is to be installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GENAI, OPTIMUM = "openvino-genai", "optimum-intel"
_PACKAGES = ("openvino", "openvino-genai", "nncf", "optimum-intel", "diffusers", "transformers")
_SAMPLES = 200  # forwards of the UNet that NNCF calibrates on: optimum-intel's default
_DECODER = "vae_decoder"

Jobs = Sequence[tuple[str, int]]
Keep = Callable[[int, Any], None]  # of a job's index and its image
Variant = dict[str, Any]


def export(model: Path, prompts: Sequence[str], steps: int, folder: Path) -> None:
    """Convert a model in diffusers' format as optimum-intel does, its UNet in INT8 by NNCF with SmoothQuant.

    Its decoder stands beside it in floats and, under another name, in INT8 by the same.
    """
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVPipelineQuantizationConfig, OVQuantizationConfig, OVStableDiffusionXLPipeline
    from transformers import AutoTokenizer

    source, floats, part = folder / "source", folder / "fp32", folder / "int8.part"
    shutil.copytree(model, source, dirs_exist_ok=True)
    for name in ("text_encoder", "text_encoder_2"):
        _rename_weights(source / name / "model.safetensors")
    OVStableDiffusionXLPipeline.from_pretrained(source, export=True, compile=False).save_pretrained(floats)
    config = OVPipelineQuantizationConfig(
        quantization_configs={"unet": OVQuantizationConfig(bits=8, num_samples=_SAMPLES)},
        dataset=list(prompts[: -(-_SAMPLES // steps)]),
        num_samples=_SAMPLES,
    )
    OVStableDiffusionXLPipeline.from_pretrained(floats, quantization_config=config).save_pretrained(part)
    for name in ("tokenizer", "tokenizer_2"):
        tokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(source / name), with_detokenizer=False)
        openvino.save_model(tokenizer, part / name / "openvino_tokenizer.xml")
    _quantize_decoder(floats, prompts, part)
    part.rename(folder / "int8")


def _quantize_decoder(floats: Path, prompts: Sequence[str], folder: Path) -> None:
    """Quantize a pipeline's decoder on the latents of these prompts; optimum-intel collects the UNet's inputs only."""
    import nncf
    import openvino
    from optimum.intel import OVStableDiffusionXLPipeline

    pipeline = OVStableDiffusionXLPipeline.from_pretrained(floats)
    pipeline.set_progress_bar_config(disable=True)
    scale = pipeline.vae.config.scaling_factor
    latents = [pipeline(prompt, output_type="latent").images / scale for prompt in prompts]
    model = openvino.Core().read_model(floats / _DECODER / "openvino_model.xml")
    quantized = nncf.quantize(
        model, nncf.Dataset([array.numpy() for array in latents]), preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(latents), fast_bias_correction=True,
    )  # fmt: skip
    target = folder.parent / f"{_DECODER}-int8"
    shutil.copytree(folder / _DECODER, target, dirs_exist_ok=True)
    openvino.save_model(quantized, target / "openvino_model.xml", compress_to_fp16=False)


def _folder(work: Path, variant: Variant) -> Path:
    """The pipeline's folder with the variant's decoder; one with the decoder in INT8 links to the other's parts."""
    if not variant["int8_decoder"]:
        return work / "int8"
    folder = work / "int8-decoder"
    folder.mkdir(exist_ok=True)
    for part in (work / "int8").iterdir():
        link, target = folder / part.name, work / f"{_DECODER}-int8" if part.name == _DECODER else part
        with contextlib.suppress(FileExistsError):
            link.symlink_to(target)
    return folder


def _rename_weights(file: Path) -> None:
    """Give a text encoder's weights the names that transformers before 5.20 reads."""
    from safetensors.torch import load_file, save_file

    named = ("text_model.", "text_projection")
    weights = load_file(file)
    renamed = {name if name.startswith(named) else f"text_model.{name}": tensor for name, tensor in weights.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def _properties(variant: Variant) -> dict[str, Any]:
    """Options of the CPU plugin."""
    return {
        "INFERENCE_NUM_THREADS": variant["threads"],
        "INFERENCE_PRECISION_HINT": "bf16" if variant["bf16"] else "f32",
        "ENABLE_CPU_PINNING": variant["pinned"],
        **({"PERFORMANCE_HINT": variant["hint"]} if variant["hint"] else {}),
    }


class GenAI:
    """OpenVINO GenAI's `Text2ImagePipeline`, with static shapes. It draws one prompt at a time."""

    def __init__(self, folder: Path, request: dict[str, Any], variant: Variant) -> None:
        import openvino_genai

        self._request = request
        self._pipeline = openvino_genai.Text2ImagePipeline(folder)
        self._pipeline.reshape(1, request["size"], request["size"], request["guidance"])
        self._pipeline.compile("CPU", **_properties(variant))

    def draw(self, jobs: Jobs, keep: Keep) -> list[float]:
        from openvino_genai import TorchGenerator
        from PIL import Image

        ends, size = [], self._request["size"]
        for index, (prompt, seed) in enumerate(jobs):
            tensor = self._pipeline.generate(
                prompt, num_inference_steps=self._request["steps"], guidance_scale=self._request["guidance"],
                width=size, height=size, generator=TorchGenerator(seed),
            )  # fmt: skip
            ends.append(time.perf_counter())
            keep(index, Image.fromarray(tensor.data[0]))
        return ends


class Optimum:
    """optimum-intel's pipeline. It draws batches, of which the last one is filled up.

    A `static` pipeline has the shapes of its batch; optimum-intel would reshape its decoder to one image.
    """

    def __init__(self, folder: Path, request: dict[str, Any], variant: Variant) -> None:
        from optimum.intel import OVStableDiffusionXLPipeline

        self._request, self._batch = request, variant["batch"]
        self._pipeline = OVStableDiffusionXLPipeline.from_pretrained(
            folder, compile=False, ov_config=_properties(variant)
        )
        self._pipeline.set_progress_bar_config(disable=True)
        if self._batch == 1 or variant["static"]:
            size = request["size"]
            self._pipeline.reshape(batch_size=self._batch, height=size, width=size, num_images_per_prompt=1)
            decoder = self._pipeline.vae_decoder.model
            _, *latent = decoder.inputs[0].get_partial_shape()
            decoder.reshape([self._batch, *latent])
        self._pipeline.compile()

    def draw(self, jobs: Jobs, keep: Keep) -> list[float]:
        import torch

        ends: list[float] = []
        for start in range(0, len(jobs), self._batch):
            batch = jobs[start : start + self._batch]
            whole = [*batch, *[batch[-1]] * (self._batch - len(batch))]
            images = self._pipeline(
                [prompt for prompt, _ in whole], width=self._request["size"], height=self._request["size"],
                num_inference_steps=self._request["steps"], guidance_scale=self._request["guidance"],
                generator=[torch.Generator().manual_seed(seed) for _, seed in whole],
            ).images  # fmt: skip
            ends += [time.perf_counter()] * len(batch)
            for index, image in enumerate(images[: len(batch)], start):
                keep(index, image)
        return ends


def serve(lines: Any, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer requests, lines of JSON, until there are no more; the first one exports, or describes a pipeline."""
    first = json.loads(next(lines))
    if first.get("export"):
        if not (Path(first["work"]) / "int8").is_dir():
            export(Path(first["model"]), first["prompts"], first["steps"], Path(first["work"]))
        answer({})
        return
    kinds: dict[str, type[GenAI] | type[Optimum]] = {GENAI: GenAI, OPTIMUM: Optimum}
    kind, work = kinds[first["rung"]], Path(first["work"])
    pipeline = kind(_folder(work, first["variant"]), first, first["variant"])
    answer({"versions": {name: importlib.metadata.version(name) for name in _PACKAGES}})
    for request in map(json.loads, lines):
        if "variant" in request:
            pipeline = kind(_folder(work, request["variant"]), first, request["variant"])
            answer({})
            continue
        jobs = _jobs(request, first["prompt"])
        started = time.perf_counter()
        ends = pipeline.draw(jobs, _keeper(request, jobs))
        answer({"ends": [end - started for end in ends], "imported": ["lab/bench/openvino_pipelines.py"]})


def _jobs(request: dict[str, Any], prompt: str) -> Jobs:
    """The images of a request: of numbers, or of `prompts` and `seeds`."""
    if "prompts" in request:
        return list(zip(request["prompts"], request["seeds"], strict=True))
    return [(prompt.format(number), number) for number in range(request["first"], request["first"] + request["count"])]


def _keeper(request: dict[str, Any], jobs: Jobs) -> Keep:
    """Return what keeps an image, in the request's `folder` if it has one."""

    def keep(index: int, image: Any) -> None:
        if "folder" in request:
            image.save(Path(request["folder"]) / f"{jobs[index][1]:05d}.png")

    return keep


def main() -> int:
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it would report this run to a server
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        serve(sys.stdin, answer)
    except Exception as error:  # the row is left out, with this reason
        answer({"left_out": f"{type(error).__name__}: {str(error).strip()[:300]}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
