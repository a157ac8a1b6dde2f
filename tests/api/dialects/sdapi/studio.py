"""A worker's easel whose pictures say how they were drawn, as a worker's do; and the card of what it offers."""

from __future__ import annotations

import io
from dataclasses import replace

from PIL import Image, PngImagePlugin

from contract.card import SizeRange
from contract.image import ImageJob
from core.jobs.record import Claim
from pipeline.pixels.infotext import infotext
from tests.api import world
from tests.api.easel import Easel

CARD = replace(
    world.CARD,
    schedulers=("euler", "euler-ancestral", "dpm++2m", "dpm++2m-sde", "lcm"),
    size_range=SizeRange(8, 64, 256, 256 * 256),
    loras=("sepia", "pixel-art"),
    lora_aliases={"MyStyle": "pixel-art"},
    embeddings=("charturner",),
    vaes=("full", "tiny"),
    upscalers=("nearest4",),
    upscale_filters=("lanczos",),
    controls=("edges", "union"),
    preprocessors=("canny",),
    image_prompts=("face",),
    refiners=("polish",),
    prompt_fields=("prompt_weighting", "clip_skip"),
)
FINGERPRINT = {"model": "emoji-xl", "weights": "0123456789abcdef", "version": "0.9"}


class Studio(Easel):
    @staticmethod
    def _picture(claim: Claim, k: int, side: int) -> bytes:
        picture = replace(ImageJob.read(claim.parameters).picture, preview_every=0)
        text = infotext(replace(picture, seed=picture.seed + k), picture.scheduler or "euler", FINGERPRINT)
        chunks, stream = PngImagePlugin.PngInfo(), io.BytesIO()
        chunks.add_text("parameters", text)
        Image.new("RGB", (side, claim.parameters["height"] if side > 8 else 8), (k, 20, 30)).save(
            stream, "PNG", pnginfo=chunks
        )
        return stream.getvalue()
