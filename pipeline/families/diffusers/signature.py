"""Reads from the signature of a pipeline's `__call__` what a request may say, and makes the call's arguments of it."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, cast, get_args

from contract.card import MAX_GUIDANCE, ImageDefaults
from contract.image import ImageParameters

ARGUMENTS = {
    "steps": "num_inference_steps", "guidance_scale": "guidance_scale", "negative_prompt": "negative_prompt",
    "strength": "strength", "eta": "eta", "prompt_2": "prompt_2", "negative_prompt_2": "negative_prompt_2",
    "clip_skip": "clip_skip",
}  # fmt: skip
"""A request's fields that some pipelines read, with the arguments that they are."""

_LENGTH = "max_sequence_length"
_OPTIONS = frozenset({
    _LENGTH, "prompt_3", "prompt_4", "negative_prompt_3", "negative_prompt_4", "system_prompt", "cfg_normalization",
    "cfg_normalize", "clean_caption", "enable_cfg_renorm", "enable_prompt_rewrite", "guess_mode", "normalize",
    "proportional_attn", "skip_text_cleaning", "use_pe", "use_resolution_binning", "adapter_conditioning_factor",
    "adapter_conditioning_scale", "aesthetic_score", "cfg_renorm_min", "cfg_trunc_ratio", "cfg_truncation",
    "clip_value", "control_guidance_end", "control_guidance_start", "controlnet_conditioning_scale", "denoising_end",
    "denoising_start", "distilled_guidance_scale", "guidance_rescale", "image_guidance_scale", "img_guidance_scale",
    "intermediate_timesteps", "max_timesteps", "mu", "negative_aesthetic_score", "prior_guidance_scale",
    "scaling_watershed", "skip_layer_guidance_scale", "skip_layer_guidance_start", "skip_layer_guidance_stop", "std",
    "true_cfg_scale", "truncation_rate",
})  # fmt: skip
"""Arguments that requests may set: they change neither the size nor the count of pictures, and add no steps."""

_CHANGES = re.compile(r"attn_processor|set_processor|register_forward_(pre_)?hook")  # in a call: of networks
_NESTED = re.compile(r"self\.\w+ = \w*Pipeline\(")
_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}  # by Python's, the narrowest first
_CONTAINERS = re.compile(r"\b(list|tuple|dict)\[[^\[\]]*\]", re.IGNORECASE)


class CallSignature:
    """The arguments of a class of pipelines, by name.

    fields: of `contract.pipeline_call.FIELDS` and prompts' fields those that it has.
    options: those of `_OPTIONS` that it has, as in `ImageOffer.options`.
    """

    def __init__(self, pipeline: type) -> None:
        call: Any = pipeline.__call__
        signature = inspect.signature(call)
        self._parameters, self._returned = signature.parameters, _returned(call, signature.return_annotation)
        self._class = pipeline
        self.fields = tuple(field for field, name in ARGUMENTS.items() if name in self)
        self.options: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            option = _option(parameter) if name in _OPTIONS else None
            if option is not None:
                self.options[name] = option

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    @cached_property
    def refusal(self) -> str:
        """Return why the class is not served: "" for one that draws pictures from a prompt and pictures alone."""
        required = (p for p in self._parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
        needed = {parameter.name for parameter in required}
        if "prompt" not in self or not needed <= {"self", "prompt", "image", "mask_image"}:
            return "does not draw from a prompt, an image and a mask alone"
        outputs = [kind for kind in get_args(self._returned) or (self._returned,) if is_dataclass(kind)]
        if not any(item.name == "images" and "list[list" not in str(item.type) for k in outputs for item in fields(k)):
            return "does not say that it returns pictures"
        if "Upscale" in self._class.__name__:
            return "draws another size than a request asks for"
        if _CHANGES.search(self._source):
            return "changes its networks during a call, while other requests draw with the same ones"
        if _NESTED.search(inspect.getsource(self._class)):
            return "holds further pipelines, each of which would run as one step that cannot be cancelled"
        return ""

    @cached_property
    def _source(self) -> str:
        return inspect.getsource(cast(Any, self._class).__call__)

    @property
    def takes_several(self) -> bool:
        """Return whether its argument `image` may be a list of pictures for one result.

        Elsewhere a list is a batch: those pipelines take tensors, too.
        """
        annotation = str(self._parameters["image"].annotation) if "image" in self else ""
        listed = "list[PIL" in annotation and "Tensor" not in annotation
        return listed or self._class.__name__.endswith("EditPlusPipeline")

    def default(self, name: str) -> Any:
        """Return an argument's default; None if it has none."""
        parameter = self._parameters.get(name)
        return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default

    @property
    def defaults(self) -> ImageDefaults:
        """Return the defaults of requests. A call is one row of the cost curve, guided or not."""
        guidance, steps = self.default("guidance_scale"), self.default("num_inference_steps")
        return ImageDefaults(
            steps=int(steps or 1), guidance_scale=float(1.0 if guidance is None else guidance), guided_above=100.0
        )

    def arguments(self, parameters: ImageParameters) -> dict[str, Any]:
        """Return the arguments of a call that a request says: all but pictures, generator and callbacks.

        What equals the default is left out, so that an argument of which None means something stays None.
        """
        values: dict[str, Any] = {name: getattr(parameters, name) for name in ARGUMENTS if name != "strength"}
        if parameters.guidance_scale == self.defaults.guidance_scale:
            values["guidance_scale"] = None
        if parameters.edit is not None:
            values["strength"] = parameters.edit.strength
        named = {"prompt": parameters.prompt, "width": parameters.width, "height": parameters.height}
        named |= {"max_area": parameters.width * parameters.height}  # FLUX Kontext scales other sizes to this area
        if "resize_and_crop_tensor" not in self._source:
            named["use_resolution_binning"] = False  # HunyuanDiT draws a size of its table, and does not scale it back
        named |= {ARGUMENTS[field]: value for field, value in values.items()}
        named = {name: value for name, value in named.items() if value is not None and name in self}
        return named | {name: value for name, value in (parameters.pipeline_options or {}).items() if name in self}

    def completed(self, check: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a pipeline's method `check_inputs`; None where one is not the call's."""
        values: dict[str, Any] = {}
        for name, parameter in inspect.signature(check).parameters.items():
            if name in self:
                values[name] = arguments.get(name, self.default(name))
            elif parameter.default is inspect.Parameter.empty:
                return None
        return values


def _returned(call: Any, annotation: Any) -> Any:
    """Return what a call is declared to return, also where its module has annotations as texts."""
    if isinstance(annotation, str):
        with contextlib.suppress(NameError, TypeError):  # of names for type checkers alone
            return eval(annotation, inspect.unwrap(call).__globals__)
    return annotation


def _option(parameter: inspect.Parameter) -> dict[str, Any] | None:
    """Return an argument as in `ImageOffer.options`; None for one that is no single value, and for a count."""
    kind, default = _kind(parameter), parameter.default
    option: dict[str, Any] = {"type": kind}
    if isinstance(default, bool | int | float | str):
        option["default"] = default
    if kind == "number":
        option |= {"minimum": -MAX_GUIDANCE, "maximum": MAX_GUIDANCE}
    elif kind == "integer":  # its default is what the class is made for
        if parameter.name != _LENGTH or not isinstance(default, int):
            return None
        option |= {"minimum": 1, "maximum": default}
    return None if kind is None else option


def _kind(parameter: inspect.Parameter) -> str | None:
    """Return the JSON type of an argument that is a single value; None for any other."""
    annotation = parameter.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    words = set(re.findall(r"\w+", _CONTAINERS.sub("", text)))
    for name, kind in _TYPES.items():
        if name in words:
            return kind
    return None
