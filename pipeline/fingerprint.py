"""Computes an image's fingerprint: everything beside its parameters that can change its bits.

Equal parameters and equal fingerprints give equal bytes for deterministic requests. It contains no time, machine name
or path, so that equal installations of equal code give the same.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from core.kernels.cpu import library
from core.kernels.describe import cuda_versions, describe, digest
from core.kernels.device import TORCH, decisions, summary

ROOT = Path(__file__).resolve().parent.parent
# The sources that an image's bits depend on: every module of ours that generation imports and that computes or decides
# something about it, and the encoders of WebP and JPEG. Paths below ROOT.
CODE = (
    "contract/a1111.py", "contract/bodies.py", "contract/bounds.py", "contract/card.py", "contract/cascade.py",
    "contract/characters.py", "contract/control.py", "contract/image.py", "contract/image_prompt.py",
    "contract/loras.py", "contract/markup.py", "contract/offered.py", "contract/picture_input.py",
    "contract/pipeline_call.py", "contract/plan.py", "contract/precision.py", "contract/printable.py",
    "contract/prompts.py", "contract/refining.py", "contract/sampler_labels.py", "contract/schedule.py",
    "contract/strict.py", "contract/students.py", "contract/tuned.py", "contract/upscale.py",
    "core/cuda_graphs.py", "core/digests.py", "core/graphs.py", "core/hub_cache.py", "core/json_files.py",
    "core/kernels", "core/ops", "core/peft_config.py", "core/quant", "core/transfers.py",
    "llm/families/encoder.py", "llm/families/family.py",
    "core/pictures.py", "llm/families/network.py", "pipeline", "unet_opt", "workers/images/formats.py",
    "workers/images/text_encoder.py",
)  # fmt: skip
_CUDA = ("core/kernels/cuda", "core/ops")
_PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "numpy")
# These variables change how torch's libraries compute.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE", "ONEDNN_MAX_CPU_ISA", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip


class Identified(Protocol):
    """A loaded model, as far as a fingerprint names it."""

    name: str
    digest: str
    precision: str
    device: torch.device


class KernelIdentity(NamedTuple):
    """The kernels of a model's UNet and VAE: a name of `core.kernels.device`, and their origin.

    `digest` is of their sources and, on a CPU, of what compiled them by `compiler`; all but the name are empty for
    torch's.
    """

    name: str = TORCH
    digest: str = ""
    compiler: str = ""

    @classmethod
    def on_cpu(cls, kernels: ctypes.CDLL) -> KernelIdentity:
        """Identify the compiled CPU kernels."""
        return cls(*library.identity(kernels))

    @classmethod
    def on_gpu(cls, model: Identified) -> KernelIdentity:
        """Identify the kernels of fused layers; elsewhere than on a GPU they run on torch."""
        if model.device.type != "cuda":
            return cls()
        device_info = describe(model.device, Path())  # of a GPU, for which nothing is compiled
        return cls(summary(decisions(device_info, model.precision))[0], digest(ROOT, _CUDA))


def code_digest() -> str:
    """Return a digest of our sources, as they were at the first call in this process."""
    return digest(ROOT, CODE)


def fingerprint(
    model: Identified, *, executable: str, bucket: int | None, kernels: KernelIdentity | None = None
) -> dict[str, Any]:
    """Return the fingerprint of an image that this model generates in this process.

    `executable` is "eager", "compiled", or "eager or compiled" if the engine chose at each step; "kernels" and "graphs"
    run on `kernels`. `bucket` is the fixed number of rows of a deterministic request's forwards. None: the request
    shared batches of any size, and its last bits may depend on them.
    """
    kernels = kernels or KernelIdentity()
    record: dict[str, Any] = {
        "model": model.name,
        "weights": model.digest,
        "precision": model.precision,
        "device": _device(model.device),
        "version": _version("diptych"),
        "code": code_digest(),
        "kernels": f"{kernels.name} {kernels.digest}".rstrip(),
        **{package: _version(package) for package in _PACKAGES},
        "pillow": _pillow(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "executable": executable,
        "bucket": bucket,
    }
    if compiler := kernels.compiler or (library.compiler_version() if "compiled" in executable else ""):
        record["compiler"] = compiler
    if model.device.type == "cuda":
        record |= cuda_versions()
    if environment := {name: os.environ[name] for name in _VARIABLES if name in os.environ}:
        record["environment"] = environment
    return record


@functools.cache
def _version(package: str) -> str | None:
    try:
        return version(package)  # reads a file each time
    except PackageNotFoundError:  # our own package: a source checkout that was never installed
        return None


@functools.cache
def _pillow() -> str:
    """Return the versions of Pillow and of its bundled PNG, JPEG and WebP libraries."""
    from PIL import features

    codecs = {
        "zlib": features.version_feature("zlib_ng") or features.version_codec("zlib"),
        "jpeg": features.version_feature("libjpeg_turbo") or features.version_codec("jpg"),
        "webp": features.version_module("webp"),
    }
    return ", ".join([str(_version("pillow")), *(f"{name} {number}" for name, number in codecs.items() if number)])


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Sums are split over threads, vector lanes and cache-sized blocks: all affect the last bits.
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"cpu {library.processor()} {capability} {threads} threads"
