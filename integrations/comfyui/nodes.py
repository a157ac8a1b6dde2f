"""The nodes, as ComfyUI reads them (`INPUT_TYPES`, `FUNCTION`, …). `draw` needs one with async nodes: 0.3.45."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from . import drawing, pictures
from .service import DEFAULT, Catalogue, Client, DiptychError, find, services

Inputs = dict[str, dict[str, Any]]

NONE = "none"
MAX_SEED = 2**64 - 1  # ComfyUI's
_SERVICE_SEEDS = 2**63
# `options` holds what has no input of its own, and nothing that would send the results elsewhere.
_NO_OPTIONS = {"webhook_url", "type", "stream", "images", "mask", "control", "image_prompts"}

log = logging.getLogger("diptych")
catalogue = Catalogue()


@dataclass(frozen=True)
class PictureEntry:
    """An entry of `control` or `image_prompts`: its fields, and its picture's PNG."""

    field: Literal["control", "image_prompts"]
    values: dict[str, Any]
    png: bytes


def _share(default: float, tooltip: str, most: float = 1.0) -> tuple[str, dict[str, Any]]:
    return "FLOAT", {"default": default, "min": 0.0, "max": most, "step": 0.01, "tooltip": tooltip}


def _choice(first: str, names: list[str], tooltip: str) -> tuple[list[str], dict[str, Any]]:
    """A choice; the answer of a workflow that names another is the service's."""
    return [first, *(name for name in names if name != first)], {"tooltip": tooltip}


class Lora:
    """A LoRA of the service's, behind those before it."""

    CATEGORY = "Diptych"
    DESCRIPTION = "A LoRA that the Diptych service has."
    FUNCTION = "add"
    RETURN_TYPES = ("DIPTYCH_LORAS",)
    RETURN_NAMES = ("loras",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        scale = {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.05}
        return {
            "required": {
                "lora": _choice(NONE, catalogue.names("loras"), "of those that the service's models list"),
                "strength": ("FLOAT", scale),
            },
            "optional": {"loras": ("DIPTYCH_LORAS", {"tooltip": "further LoRAs"})},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, lora: str) -> bool:  # noqa: N802
        return True

    def add(self, lora: str, strength: float, loras: tuple[str, ...] = ()) -> tuple[tuple[str, ...]]:
        """The LoRAs as the service's field `lora` has them."""
        return ((*loras, *([] if lora == NONE else [f"{lora}:{strength:g}"])),)


class Control:
    """A picture that the image follows, behind those before it."""

    CATEGORY = "Diptych"
    DESCRIPTION = "A picture that the image follows, and the control network of the Diptych service that reads it."
    FUNCTION = "add"
    RETURN_TYPES = ("DIPTYCH_CONTROLS",)
    RETURN_NAMES = ("controls",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        preprocessors = catalogue.names("preprocessors")
        mode = {"default": -1, "min": -1, "max": 100, "tooltip": "of a ControlNet-Union; -1: of no such network"}
        return {
            "required": {
                "image": ("IMAGE",),
                "control": _choice(NONE, catalogue.names("controls"), "of those that the service's models list"),
                "preprocessor": _choice(NONE, preprocessors, "what the service makes of the picture first"),
                "strength": _share(1.0, "factor of what the network adds", most=10.0),
                "start": _share(0.0, "the share of the steps before which it does not act"),
                "end": _share(1.0, "the share of the steps after which it ends"),
            },
            "optional": {"mode": ("INT", mode), "controls": ("DIPTYCH_CONTROLS", {"tooltip": "further controls"})},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, control: str, preprocessor: str) -> bool:  # noqa: N802
        return True

    def add(
        self, image: torch.Tensor, control: str, preprocessor: str, strength: float, start: float, end: float,
        mode: int = -1, controls: tuple[PictureEntry, ...] = (),
    ) -> tuple[tuple[PictureEntry, ...]]:  # fmt: skip
        """The controls with this one."""
        if control == NONE:
            return (controls,)
        values: dict[str, Any] = {"model": control, "strength": strength, "start": start, "end": end}
        values |= {} if preprocessor == NONE else {"preprocessor": preprocessor}
        values |= {} if mode < 0 else {"mode": mode}
        return ((*controls, PictureEntry("control", values, pictures.as_png("control.image", image))),)


class ImagePrompt:
    """A picture that the image is drawn like, behind those before it."""

    CATEGORY = "Diptych"
    DESCRIPTION = "A picture that the image is drawn like, and the IP-Adapter of the Diptych service that reads it."
    FUNCTION = "add"
    RETURN_TYPES = ("DIPTYCH_IMAGE_PROMPTS",)
    RETURN_NAMES = ("image_prompts",)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        return {
            "required": {
                "image": ("IMAGE",),
                "adapter": _choice(NONE, catalogue.names("image_prompts"), "of those that the service's models list"),
                "strength": _share(1.0, "factor of what attention to the picture gives", most=10.0),
                "start": _share(0.0, "the share of the steps before which it does not act"),
                "end": _share(1.0, "the share of the steps after which it ends"),
            },
            "optional": {"image_prompts": ("DIPTYCH_IMAGE_PROMPTS", {"tooltip": "further image prompts"})},
        }

    @classmethod
    def VALIDATE_INPUTS(cls, adapter: str) -> bool:  # noqa: N802
        return True

    def add(
        self, image: torch.Tensor, adapter: str, strength: float, start: float, end: float,
        image_prompts: tuple[PictureEntry, ...] = (),
    ) -> tuple[tuple[PictureEntry, ...]]:  # fmt: skip
        """The image prompts with this one."""
        if adapter == NONE:
            return (image_prompts,)
        values = {"model": adapter, "strength": strength, "start": start, "end": end}
        png = pictures.as_png("image_prompts.image", image)
        return ((*image_prompts, PictureEntry("image_prompts", values, png)),)


class Sampler:
    """Draws images at a Diptych service, as one job."""

    CATEGORY = "Diptych"
    DESCRIPTION = "Draws images at a Diptych service; with an image it edits that, with a mask only where it is white."
    FUNCTION = "draw"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("images", "info")
    OUTPUT_TOOLTIPS: ClassVar = ("n pictures", "JSON: the job's id, model, seeds and warnings, and the request")

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        try:
            names = sorted(services())
        except DiptychError:  # told when the node runs
            names = [DEFAULT]
        side = {"default": 0, "min": 0, "max": 8192, "step": 8, "tooltip": "0: of the model, or of the image"}
        return {
            "required": {
                "service": _choice(DEFAULT, names, "configured where ComfyUI runs, and so is its key: see README.md"),
                "model": _choice(DEFAULT, catalogue.names("id"), "default: the service's first image model"),
                "prompt": ("STRING", {"multiline": True, "dynamicPrompts": True, "default": ""}),
                "negative_prompt": ("STRING", {"multiline": True, "dynamicPrompts": True, "default": ""}),
                "width": ("INT", side),
                "height": ("INT", side),
                "seed": ("INT", {"default": 0, "min": 0, "max": MAX_SEED, "control_after_generate": True}),
                "steps": ("INT", {"default": 0, "min": 0, "max": 1000, "tooltip": "0: the model's, or the plan's"}),
                "guidance": (
                    "FLOAT",
                    {"default": -1.0, "min": -1.0, "max": 100.0, "step": 0.1, "tooltip": "-1: the model's"},
                ),
                "sampler": _choice(DEFAULT, catalogue.names("schedulers"), "default: the model's"),
                "plan": _choice(DEFAULT, ["auto", "off", *catalogue.names("plans")], "default: the model's"),
                "deepcache": _choice(DEFAULT, ["auto", "off"], "default: the model's"),
                "n": ("INT", {"default": 1, "min": 1, "max": 10, "tooltip": "images, of seeds that follow each other"}),
                "preview_every": ("INT", {"default": 4, "min": 0, "max": 1000, "tooltip": "steps; 0: no previews"}),
                "timeout_s": (
                    "INT",
                    {"default": 600, "min": 1, "max": 86400, "tooltip": "seconds until the job is given up"},
                ),
            },
            "optional": {
                "image": ("IMAGE", {"tooltip": "what is edited"}),
                "mask": ("MASK", {"tooltip": "white is drawn anew; all else keeps its pixels"}),
                "strength": _share(0.8, "with an image: the share of the steps that runs"),
                "soft_mask": ("BOOLEAN", {"default": False, "tooltip": "grey is drawn anew in the last steps only"}),
                "loras": ("DIPTYCH_LORAS",),
                "controls": ("DIPTYCH_CONTROLS",),
                "image_prompts": ("DIPTYCH_IMAGE_PROMPTS",),
                "options": (
                    "STRING",
                    {"multiline": True, "default": "", "tooltip": 'further fields: {"clip_skip": 1}'},
                ),
            },
            "hidden": {"node": "UNIQUE_ID"},
        }

    @classmethod
    def VALIDATE_INPUTS(  # noqa: N802
        cls, service: str, model: str, sampler: str, plan: str
    ) -> bool | str:
        """Take names that are not listed: the lists hold what the services had when they were last asked."""
        try:
            known = services()
        except DiptychError as error:
            return str(error)
        return service in known or f"{service!r} is not configured on this machine, which knows {', '.join(known)}"

    async def draw(
        self, service: str, width: int, height: int, n: int, timeout_s: int, image: torch.Tensor | None = None,
        mask: torch.Tensor | None = None, strength: float = 0.8, soft_mask: bool = False,
        controls: tuple[PictureEntry, ...] = (), image_prompts: tuple[PictureEntry, ...] = (), node: str = "",
        **fields: Any,
    ) -> tuple[torch.Tensor, str]:  # fmt: skip
        """The images, and JSON of what they are. Raises `DiptychError`, and what ComfyUI raises when it is stopped."""
        client = Client(find(service))
        request = request_of(n=n, deadline_s=timeout_s, **fields)
        if (width > 0) != (height > 0):
            raise DiptychError("width, height: must both be given, or both be 0")
        if width:
            request["size"] = f"{width}x{height}"
        entries, pngs = [*controls, *image_prompts], []
        if image is not None:
            request |= {"type": "edit", "strength": strength}
            pngs.append(pictures.as_png("image", image))
            if mask is not None:
                request |= {"soft_mask": True} if soft_mask else {}
                pngs.append(pictures.mask_as_png("mask", mask, image, soft=soft_mask))
        elif mask is not None:
            raise DiptychError("mask: needs an image")
        place = partial(_placed, entries, edit=image is not None, masked=mask is not None)
        pngs += [entry.png for entry in entries]
        drawn = await drawing.draw(client, request, pngs, place, float(timeout_s))
        for warning in drawn.warnings:
            log.warning("Diptych: %s", warning)
        _show_text(node, "\n".join(drawn.warnings))
        info = {
            "service": service, "job_id": drawn.job["id"], "model": drawn.job["model"],
            "seeds": drawn.seeds, "warnings": drawn.warnings, "request": request,
        }  # fmt: skip
        return pictures.as_image(drawn.files), json.dumps(info, ensure_ascii=False)


def request_of(
    *, model: str, prompt: str, negative_prompt: str, seed: int, steps: int, guidance: float, sampler: str, plan: str,
    deepcache: str, n: int, preview_every: int, deadline_s: int, loras: tuple[str, ...] = (), options: str = "",
) -> dict[str, Any]:  # fmt: skip
    """The fields of a job, without what is left to the service. Raises `DiptychError` with the field's name."""
    given = {
        "type": "image", "prompt": prompt, "seed": seed % _SERVICE_SEEDS, "n": n, "preview_every": preview_every,
        "deadline_s": deadline_s,
    }  # fmt: skip
    chosen = {"model": model, "scheduler": sampler, "plan": plan, "deepcache": deepcache}
    given |= {name: value for name, value in chosen.items() if value != DEFAULT}
    given |= {"negative_prompt": negative_prompt} if negative_prompt else {}
    given |= {"steps": steps} if steps else {}
    given |= {"guidance_scale": guidance} if guidance >= 0 else {}
    given |= {"lora": ",".join(loras)} if loras else {}
    try:
        further = json.loads(options) if options.strip() else {}
    except ValueError as error:
        raise DiptychError(f"options: is not JSON: {error}") from None
    if not isinstance(further, dict):
        raise DiptychError('options: must be an object of fields, such as {"clip_skip": 1}')
    if clash := sorted(further.keys() & (given.keys() | _NO_OPTIONS)):
        raise DiptychError(f"options: {', '.join(clash)} cannot be given here")
    return {**further, **given}


def _placed(entries: list[PictureEntry], ids: list[str], *, edit: bool, masked: bool) -> dict[str, Any]:
    """The fields that name the pictures: of the image, the mask and the entries, in this order."""
    files = iter({"file_id": id} for id in ids)
    fields: dict[str, Any] = {"images": [next(files)]} if edit else {}
    fields |= {"mask": next(files)} if masked else {}
    for entry in entries:
        fields.setdefault(entry.field, []).append({**entry.values, "image": next(files)})
    return fields


def _show_text(node: str, text: str) -> None:
    """Show text at the node, where ComfyUI can."""
    if not text or not node:
        return
    try:
        from server import PromptServer  # ComfyUI's; absent where nodes run without it
    except ImportError:
        return
    server = PromptServer.instance
    if hasattr(server, "send_progress_text"):
        server.send_progress_text(text, node, server.client_id)


NODE_CLASS_MAPPINGS = {
    "DiptychSampler": Sampler,
    "DiptychLora": Lora,
    "DiptychControl": Control,
    "DiptychImagePrompt": ImagePrompt,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "DiptychSampler": "Diptych Sampler",
    "DiptychLora": "Diptych LoRA",
    "DiptychControl": "Diptych Control",
    "DiptychImagePrompt": "Diptych Image Prompt",
}
