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
_LISTED = "of those that the service's models list"
MAX_SEED = 2**64 - 1  # ComfyUI's
_SERVICE_SEEDS = 2**63
# `options` holds what has no input of its own, and nothing that would send the results elsewhere.
_NO_OPTIONS = {"webhook_url", "type", "stream", "images", "mask", "strength", "soft_mask", "control", "image_prompts"}

log = logging.getLogger("diptych")
catalogue = Catalogue()


@dataclass(frozen=True)
class PictureEntry:
    """An entry of `control` or `image_prompts`: its fields, and its picture's PNG."""

    field: Literal["control", "image_prompts"]
    values: dict[str, Any]
    png: bytes


Entries = tuple[PictureEntry, ...]


def _share(default: float, tooltip: str, most: float = 1.0) -> tuple[str, dict[str, Any]]:
    return "FLOAT", {"default": default, "min": 0.0, "max": most, "step": 0.01, "tooltip": tooltip}


def _choice(first: str, names: list[str], tooltip: str) -> tuple[list[str], dict[str, Any]]:
    """A choice; the answer of a workflow that names another is the service's."""
    return [first, *(name for name in names if name != first)], {"tooltip": tooltip}


def _picture_inputs(tooltip: str, **choices: Any) -> dict[str, Any]:
    """The inputs of a node that makes a `PictureEntry`: these choices, and a strength with this tooltip."""
    return {
        "image": ("IMAGE",),
        **choices,
        "strength": _share(1.0, tooltip, most=10.0),
        "start": _share(0.0, "the share of the steps before which it does not act"),
        "end": _share(1.0, "the share of the steps after which it ends"),
    }


def _with_entry(
    entries: Entries, field: Literal["control", "image_prompts"], image: torch.Tensor, model: str, **values: Any
) -> tuple[Entries]:
    """The entries with one more, unless its model is none."""
    if model == NONE:
        return (entries,)
    png = pictures.as_png(f"{field}.image", image)
    return ((*entries, PictureEntry(field, {"model": model, **values}, png)),)


class Entry:
    """A node that adds an entry to a list of the sampler's, behind those before it."""

    CATEGORY = "Diptych"
    FUNCTION = "add"
    RETURN_NAMES: ClassVar[tuple[str]]
    RETURN_TYPES: ClassVar[tuple[str]]

    def __init_subclass__(cls, entries: str) -> None:
        cls.RETURN_NAMES, cls.RETURN_TYPES = (entries,), (f"DIPTYCH_{entries.upper()}",)

    @classmethod
    def inputs(cls) -> Inputs:
        """The inputs of an entry, without the entries before it."""
        raise NotImplementedError

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:  # noqa: N802
        (entries,), inputs = cls.RETURN_NAMES, cls.inputs()
        before = (*cls.RETURN_TYPES, {"tooltip": f"further {entries.replace('_', ' ')}"})
        return {**inputs, "optional": {**inputs.get("optional", {}), entries: before}}

    @classmethod
    def VALIDATE_INPUTS(  # noqa: N802
        cls, lora: str = "", control: str = "", preprocessor: str = "", adapter: str = ""
    ) -> bool:
        """Take names that are not listed, as the sampler does."""
        return True


class Lora(Entry, entries="loras"):
    DESCRIPTION = "A LoRA that the Diptych service has."

    @classmethod
    def inputs(cls) -> Inputs:
        scale = {"default": 1.0, "min": -100.0, "max": 100.0, "step": 0.05}
        return {"required": {"lora": _choice(NONE, catalogue.names("loras"), _LISTED), "strength": ("FLOAT", scale)}}

    def add(self, lora: str, strength: float, loras: tuple[str, ...] = ()) -> tuple[tuple[str, ...]]:
        """The LoRAs as the service's field `lora` has them."""
        return ((*loras, *([] if lora == NONE else [f"{lora}:{strength:g}"])),)


class Control(Entry, entries="controls"):
    DESCRIPTION = "A picture that the image follows, and the control network of the Diptych service that reads it."

    @classmethod
    def inputs(cls) -> Inputs:
        mode = {"default": -1, "min": -1, "max": 100, "tooltip": "of a ControlNet-Union; -1: of no such network"}
        computed = "what the service makes of the picture first"
        return {
            "required": _picture_inputs(
                "factor of what the network adds",
                control=_choice(NONE, catalogue.names("controls"), _LISTED),
                preprocessor=_choice(NONE, catalogue.names("preprocessors"), computed),
            ),
            "optional": {"mode": ("INT", mode)},
        }

    def add(
        self, image: torch.Tensor, control: str, preprocessor: str, mode: int = -1, controls: Entries = (),
        **shares: float,
    ) -> tuple[Entries]:  # fmt: skip
        """The controls with this one."""
        further: dict[str, Any] = {} if preprocessor == NONE else {"preprocessor": preprocessor}
        further |= {} if mode < 0 else {"mode": mode}
        return _with_entry(controls, "control", image, control, **shares, **further)


class ImagePrompt(Entry, entries="image_prompts"):
    DESCRIPTION = "A picture that the image is drawn like, and the IP-Adapter of the Diptych service that reads it."

    @classmethod
    def inputs(cls) -> Inputs:
        adapter = _choice(NONE, catalogue.names("image_prompts"), _LISTED)
        return {"required": _picture_inputs("factor of what attention to the picture gives", adapter=adapter)}

    def add(self, image: torch.Tensor, adapter: str, image_prompts: Entries = (), **shares: float) -> tuple[Entries]:
        """The image prompts with this one."""
        return _with_entry(image_prompts, "image_prompts", image, adapter, **shares)


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
        cls, service: str | None, model: str, sampler: str, plan: str
    ) -> bool | str:
        """Take names that are not listed: the lists hold what the services had when they were last asked. A service
        that another node outputs, None here, is looked up when this one runs.
        """
        try:
            _ = services() if service is None else find(service)
        except DiptychError as error:
            return str(error)
        return True

    async def draw(
        self, service: str, timeout_s: int, image: torch.Tensor | None = None, mask: torch.Tensor | None = None,
        strength: float = 0.8, soft_mask: bool = False, controls: Entries = (), image_prompts: Entries = (),
        node: str = "", **fields: Any,
    ) -> tuple[torch.Tensor, str]:  # fmt: skip
        """The images, and JSON of what they are. Raises `DiptychError`, and what ComfyUI raises when it is stopped."""
        client = Client(find(service))
        request = request_of(deadline_s=timeout_s, **fields)
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
            "seeds": [image["seed"] for image in drawn.images], "warnings": drawn.warnings, "request": request,
        }  # fmt: skip
        return pictures.as_image(drawn.files), json.dumps(info, ensure_ascii=False)


def request_of(
    *, model: str, prompt: str, negative_prompt: str, width: int, height: int, seed: int, steps: int, guidance: float,
    sampler: str, plan: str, deepcache: str, n: int, preview_every: int, deadline_s: int, loras: tuple[str, ...] = (),
    options: str = "",
) -> dict[str, Any]:  # fmt: skip
    """The fields of a job, without what is left to the service. Raises `DiptychError` with the field's name."""
    given = {
        "type": "image", "prompt": prompt, "seed": seed % _SERVICE_SEEDS, "n": n, "preview_every": preview_every,
        "deadline_s": deadline_s,
    }  # fmt: skip
    chosen = {"model": model, "scheduler": sampler, "plan": plan, "deepcache": deepcache}
    given |= {name: value for name, value in chosen.items() if value != DEFAULT}
    if (width > 0) != (height > 0):
        raise DiptychError("width, height: must both be given, or both be 0")
    given |= {"size": f"{width}x{height}"} if width else {}
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
