"""Reads from the signature of a pipeline's `__call__` what a request may say, and makes the call's arguments of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from contract.card import ImageDefaults
from contract.image import ImageParameters

ARGUMENTS = {
    "steps": "num_inference_steps", "guidance_scale": "guidance_scale", "negative_prompt": "negative_prompt",
    "strength": "strength", "eta": "eta", "prompt_2": "prompt_2", "negative_prompt_2": "negative_prompt_2",
    "clip_skip": "clip_skip",
}  # fmt: skip
"""A request's fields that some pipelines read, with the arguments that they are."""

_OWN = {*ARGUMENTS.values(), "self", "prompt", "width", "height", "generator", "num_images_per_prompt", "latents"}
_OURS = re.compile(r"(_embeds|_mask|image|_kwargs|_tensor_inputs|_type|_dict)$|^_|^callback|^image|^mask")
_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string"}  # by Python's, the narrowest first
_CONTAINERS = re.compile(r"\b(list|tuple|dict)\[[^\[\]]*\]", re.IGNORECASE)


class CallSignature:
    """The arguments of a class of pipelines, by name.

    fields: of `contract.pipeline_call.FIELDS` and prompts' fields those that it has.
    options: the other arguments that are a number, a text or a flag, as in `ImageOffer.options`.
    """

    def __init__(self, pipeline: type) -> None:
        call: Any = pipeline.__call__
        signature = inspect.signature(call)
        self._parameters, self._returned = signature.parameters, signature.return_annotation
        self._name = pipeline.__name__
        self.fields = tuple(field for field, name in ARGUMENTS.items() if name in self)
        self.options: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            kind = _kind(parameter)
            if kind is not None and name not in _OWN and not _OURS.search(name):
                default = parameter.default
                known = isinstance(default, bool | int | float | str)
                self.options[name] = {"type": kind, **({"default": default} if known else {})}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    @property
    def draws(self) -> bool:
        """Return whether a call needs nothing but a prompt and pictures, and returns pictures, as far as it says."""
        required = (p for p in self._parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
        needed = {parameter.name for parameter in required}
        outputs = [kind for kind in get_args(self._returned) or (self._returned,) if is_dataclass(kind)]
        pictures = not outputs or any(item.name == "images" for kind in outputs for item in fields(kind))
        return pictures and "prompt" in self and needed <= {"self", "prompt", "image", "mask_image"}

    @property
    def takes_several(self) -> bool:
        """Return whether its argument `image` may be a list of pictures for one result.

        Elsewhere a list is a batch: those pipelines take tensors, too.
        """
        annotation = str(self._parameters["image"].annotation) if "image" in self else ""
        listed = "list[PIL" in annotation and "Tensor" not in annotation
        return listed or self._name.endswith("EditPlusPipeline")

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
        said: dict[str, Any] = {name: getattr(parameters, name) for name in ARGUMENTS if name != "strength"}
        said |= {"guidance_scale": _changed(parameters.guidance_scale, self.defaults.guidance_scale)}
        if parameters.edit is not None:
            said["strength"] = parameters.edit.strength
        named = {"prompt": parameters.prompt, "width": parameters.width, "height": parameters.height}
        named |= {"max_area": parameters.width * parameters.height}  # FLUX Kontext scales other sizes to this area
        named |= {ARGUMENTS[field]: value for field, value in said.items()}
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


def _changed(value: float, default: float) -> float | None:
    return None if value == default else value


def _kind(parameter: inspect.Parameter) -> str | None:
    """Return the JSON type of an argument that is a single value; None for any other."""
    annotation = parameter.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    words = set(re.findall(r"\w+", _CONTAINERS.sub("", text)))
    for name, kind in _TYPES.items():
        if name in words:
            return kind
    return None
