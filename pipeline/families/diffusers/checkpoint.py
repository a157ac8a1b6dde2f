"""Loads a pipeline of diffusers with the precision, offload and compilation of the settings."""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from contract import pipeline_call
from contract.card import ImageDefaults, ImageOffer, Size, SizeRange
from contract.precision import dtype as dtype_of
from contract.precision import is_quantized, unquantized
from core.digests import digest_of
from pipeline import sizes
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.folder import ModelError, first_line
from pipeline.checkpoints.load import quiet, short_name
from pipeline.families.diffusers import find
from pipeline.families.diffusers.signature import CallSignature

log = logging.getLogger(__name__)

REFERENCE = "reference"
"""The name by which image prompts are offered: further pictures of an edit."""

_DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder")
_GRID = 16  # pixels
_NATIVE = 1024  # pixels, where neither the class nor the weights tell
_PACKAGES = {"int8": "torchao", "int8-dynamic": "torchao", "fp8": "torchao", "nf4": "bitsandbytes", "gguf": "gguf"}
"""The package that a precision needs, where it is one."""
_REQUIRES = re.compile(r"(\w+) requires the (\w+) library")  # in transformers' errors
_OFFLOADS = {
    "model": "enable_model_cpu_offload", "sequential": "enable_sequential_cpu_offload",
    "group": "enable_group_offload",
}  # fmt: skip


@dataclass(eq=False)
class DiffusersModel:
    """A pipeline, and those of its tasks, by the kinds of `contract.pipeline_call`; they share their networks.

    `plans` and `gates` are those of native families; such a model has none.
    """

    name: str
    digest: str
    precision: str
    device: torch.device
    pipelines: Mapping[str, Any]
    offload: str = "off"
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gates: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def signatures(self) -> Mapping[str, CallSignature]:
        return {kind: CallSignature(type(pipeline)) for kind, pipeline in self.pipelines.items()}

    @property
    def base(self) -> Any:
        """Return the pipeline of the simplest kind of request that it draws."""
        return next(iter(self.pipelines.values()))

    @property
    def defaults(self) -> ImageDefaults:
        return next(iter(self.signatures.values())).defaults

    @cached_property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """Return its networks, by name."""
        components = {name: part for pipeline in self.pipelines.values() for name, part in pipeline.components.items()}
        return {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}

    @property
    def vae(self) -> Any:
        return self.modules.get("vae")

    @property
    def weight_bytes(self) -> int:
        """Return the memory that its weights take, in whichever memory they are."""
        held = [t for module in self.modules.values() for t in (*module.parameters(), *module.buffers())]
        tensors = (plain for tensor in held if not tensor.is_meta for plain in _plain(tensor))
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @cached_property
    def multiple(self) -> int:
        """Return the pixels that every side is a multiple of: two latents, which most networks read as one token, and
        16, which some pipelines ask for whatever their latents are.
        """
        return math.lcm(_GRID, 2 * int(getattr(self.base, "vae_scale_factor", 8)))

    @cached_property
    def native(self) -> int:
        """Return the side of its native size, in pixels: the default of its argument or of its weights."""
        height = next(iter(self.signatures.values())).default("height")
        denoisers = (self.modules[name] for name in _DENOISERS if name in self.modules)
        latents = getattr(self.base, "default_sample_size", None) or next(
            (size for part in denoisers if (size := getattr(part.config, "sample_size", None))), None
        )
        scale = int(getattr(self.base, "vae_scale_factor", 8))
        side = height if isinstance(height, int) else scale * latents if isinstance(latents, int) else _NATIVE
        return max(self.multiple, side // self.multiple * self.multiple)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return sizes.sizes(self.native, self.multiple)

    @property
    def size_range(self) -> SizeRange:
        return sizes.size_range(self.native, self.multiple)

    @property
    def scheduler(self) -> str:
        """Return the class name of its scheduler, the one sampler that it offers."""
        return type(self.base.scheduler).__name__

    @cached_property
    def offer(self) -> ImageOffer:
        """Return what requests are checked against."""
        signatures = self.signatures.values()
        fields = {name for signature in signatures for name in signature.fields}
        several = any(signature.takes_several for signature in signatures)
        return ImageOffer(
            self.sizes, (self.scheduler,), (self.native, self.native), precision=self.precision, loras=(),
            defaults=self.defaults, prompt_fields=tuple(sorted(fields - {*pipeline_call.FIELDS})),
            size_range=self.size_range, upscalers=(), controls=(), preprocessors=(), refiners=(),
            image_prompts=(REFERENCE,) if several else (), cascades={},
            fields=tuple(name for name in pipeline_call.FIELDS if name in fields), sources=tuple(self.pipelines),
            options={name: option for signature in signatures for name, option in signature.options.items()},
        )  # fmt: skip


def _plain(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a quantized one is made of, or else itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def load(
    name: str, folder: Path | None = None, *, precision: str, device: str, variant: str | None = None,
    weights: str = "", offload: str = "off", compiled: bool = False,
) -> DiffusersModel:  # fmt: skip
    """Load the pipeline of this folder or hub id.

    Args:
        folder: the one that `find` returned for it; None: it is found here.
        precision: of `contract.precision`, or nf4; "auto": fp32 on a CPU, bf16 on a GPU. Denoisers alone are quantized.
        weights: a file of the denoiser in GGUF, in place of the folder's; "": none.
        offload: off, model, sequential or group, as diffusers and accelerate have them.
        compiled: whether a GPU's denoisers compile their repeated blocks, at their first forward.

    Raises:
        ModelError: for files that do not load, a package that is missing, and what the device does not run.
    """
    import diffusers

    folder = folder or find(name)
    if folder is None:
        raise ModelError(f"{name}: is no pipeline of diffusers without a native family")
    index = folders.read_json(folder / "model_index.json")
    kind = getattr(diffusers, index["_class_name"])
    # Where a package is missing diffusers has a stand-in for the class, which names those that it needs.
    if packages := " ".join(name for name in getattr(kind, "_backends", ()) if find_spec(name) is None):
        raise ModelError(f"{folder}/model_index.json: a {kind.__name__} needs packages: pip install {packages}")
    if refusal := CallSignature(kind).refusal:
        raise ModelError(f"{folder}/model_index.json: is a {kind.__name__}, which {refusal}")
    where = torch.device(device)
    quantized = "gguf" if weights else precision if precision in _PACKAGES else ""
    plain = unquantized(where.type) if quantized or precision == "auto" else precision
    dtype = getattr(torch, dtype_of(plain, where.type))
    if not quantized and is_quantized(precision):
        raise ModelError(f"{precision}: is for native families, which {name} is none of")
    _check(quantized, offload, where)
    local = Path(name).expanduser().is_dir()
    options: dict[str, Any] = {"torch_dtype": dtype, "variant": variant, "use_safetensors": True}
    try:
        with quiet():
            if weights:
                options |= _gguf(folder, index, Path(weights), dtype)
            elif quantized:
                options["quantization_config"] = _quantization(index, quantized, dtype)
            base = diffusers.DiffusionPipeline.from_pretrained(
                str(folder) if local else name, local_files_only=local, **options
            )
            pipelines = _tasks(base)
            if offload == "off":
                base.to(where)
    except ModelError:
        raise
    except Exception as error:  # many libraries, many exceptions
        missing = _REQUIRES.search(str(error)) if isinstance(error, ImportError) else None
        if missing is not None:
            package = missing[2].lower()
            raise ModelError(
                f"{name}: its {missing[1]} needs the package {package}: pip install {package}, in the release for "
                f"torch {torch.__version__.partition('+')[0]}"
            ) from error
        raise ModelError(f"{name}: does not load ({type(error).__name__}: {first_line(error)})") from error
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".txt", ".safetensors", ".model")]
    digest = digest_of(folder, files)
    if weights:
        digest = f"{digest} {digest_of(Path(weights).parent, [Path(weights)])}"
    model = DiffusersModel(short_name(name), digest, quantized or plain, where, pipelines, offload)
    # `requires_grad` stays as the library has it: without gradients torch takes other kernels, with other last bits.
    if offload != "off":
        _offload(model)
    elif compiled and where.type == "cuda":
        _compile(model)
    return model


def _check(quantized: str, offload: str, device: torch.device) -> None:
    package = _PACKAGES.get(quantized)
    if package is not None and find_spec(package) is None:
        raise ModelError(f"{quantized}: by diffusers' own loop it needs the package {package}: pip install {package}")
    if quantized in ("fp8", "nf4") and device.type == "cpu":
        raise ModelError(f"{quantized} does not run on a CPU; take int8 or fp32")
    if offload != "off" and device.type == "cpu":
        raise ModelError(f"offload: {offload} moves weights between a GPU and the host's memory, and this is a CPU")


def _tasks(base: Any) -> dict[str, Any]:
    """Return the pipelines of requests without a picture, with one, and with a mask, as far as there are any."""
    import diffusers

    own, tasks = CallSignature(type(base)), dict[str, Any]()
    for kind, automatic in (
        (pipeline_call.TEXT, diffusers.AutoPipelineForText2Image),
        (pipeline_call.IMAGE, diffusers.AutoPipelineForImage2Image),
        (pipeline_call.MASK, diffusers.AutoPipelineForInpainting),
    ):
        try:
            tasks[kind] = automatic.from_pipe(base)
        except (ValueError, AttributeError):  # the class has no counterpart of this kind, or lacks a part for it
            if kind == _kind(own):
                tasks[kind] = base
    drawing = {kind: task for kind, task in tasks.items() if not CallSignature(type(task)).refusal}
    return {kind: base if type(task) is type(base) else task for kind, task in drawing.items()}


def _kind(own: CallSignature) -> str:
    """Return the kind of request of a class that diffusers has no table of."""
    if "mask_image" in own:
        return pipeline_call.MASK
    return pipeline_call.IMAGE if "image" in own else pipeline_call.TEXT


def _quantization(index: Mapping[str, Any], precision: str, dtype: torch.dtype) -> Any:
    from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig, TorchAoConfig

    denoisers = [name for name in _DENOISERS if name in index]
    config: Any
    if precision == "nf4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    else:
        methods: Any = importlib.import_module("torchao.quantization")
        classes = {
            "int8": "Int8WeightOnlyConfig", "int8-dynamic": "Int8DynamicActivationInt8WeightConfig",
            "fp8": "Float8WeightOnlyConfig",
        }  # fmt: skip
        config = TorchAoConfig(getattr(methods, classes[precision])())
    return PipelineQuantizationConfig(quant_mapping=dict.fromkeys(denoisers, config))


def _gguf(folder: Path, index: Mapping[str, Any], weights: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Return the denoiser of a file in GGUF, by the name of its part."""
    import diffusers

    name = next((name for name in _DENOISERS if name in index), "")
    if weights.suffix != ".gguf" or not weights.is_file() or not name:
        raise ModelError(f"{weights}: of a pipeline that runs by diffusers' own loop this must be a file in GGUF")
    network = getattr(diffusers, index[name][1]).from_single_file(
        str(weights), quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
        config=str(folder), subfolder=name, torch_dtype=dtype,
    )  # fmt: skip
    return {name: network}


def _offload(model: DiffusersModel) -> None:
    base = model.base
    options: dict[str, Any] = {"device": model.device}
    if model.offload == "group":
        options = {
            "onload_device": model.device, "offload_type": "leaf_level", "use_stream": model.device.type == "cuda",
        }  # fmt: skip
    try:
        getattr(base, _OFFLOADS[model.offload])(**options)
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ModelError(f"offload: {model.offload} does not work here ({first_line(error)})") from error
    for pipeline in model.pipelines.values():  # the others know of hooks of the shared networks what this one knows
        for name in ("_all_hooks", "_offload_device", "_offload_gpu_id"):
            if pipeline is not base and name in vars(base):
                object.__setattr__(pipeline, name, vars(base)[name])


def _compile(model: DiffusersModel) -> None:
    """Mark the blocks that its denoisers repeat, by the class's own list or else by that of blocks to keep whole."""
    for name, module in model.modules.items():
        if name not in _DENOISERS:
            continue
        denoiser: Any = module
        names = getattr(denoiser, "_repeated_blocks", None) or getattr(denoiser, "_no_split_modules", None) or ()
        blocks: list[Any] = [part for part in denoiser.modules() if type(part).__name__ in names]
        for block in blocks:
            block.compile()
        if blocks:
            log.info("%s: %d blocks of its %s are compiled at their first forward", model.name, len(blocks), name)
        else:
            log.warning("%s: its %s runs eagerly: diffusers names no blocks to compile", model.name, name)
