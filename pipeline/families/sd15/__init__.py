"""Stable Diffusion 1.x (Rombach et al., 2022): a UNet of SDXL's kind that reads one CLIP text encoder and no size."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints.folder import Part
from pipeline.families.family import Adapters, Embed, Family, ImageModel, Prepare, Seeded
from pipeline.families.sd15.parts import PARTS, SD15Adapters, check
from pipeline.families.sdxl import SDXL

if TYPE_CHECKING:
    import torch

    from contract.image import ImageParameters
    from pipeline.sampling.denoise import Conditioning
    from pipeline.text.encode import Embedding, TextEncoder


class SD15(SDXL):
    """`Family` for Stable Diffusion 1.x. What it does not define is as in SDXL."""

    label = "Stable Diffusion 1"
    pipelines: tuple[str, ...] = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline")
    parts: Mapping[str, Part] = PARTS
    prompt_fields: Collection[str] = ()
    adapters: Adapters = SD15Adapters()
    image_prompts = False

    def seeded(self, name: str) -> Seeded | None:
        return None

    def options(self, index: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    def check(self, name: str, parts: Mapping[str, Any]) -> None:
        check(name, parts)

    def rows(self, model: ImageModel, wanted: ImageParameters) -> int:
        return self.defaults.rows(wanted.guidance_scale)

    def embed(self, model: ImageModel, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        from pipeline.families.sd15.conditioning import embed

        return embed(model, ids)

    def example_ids(self, model: ImageModel, rows: int) -> list[torch.Tensor]:
        import torch

        tokens = model.parts["tokenizer"].model_max_length
        return [torch.zeros(rows, tokens, dtype=torch.long, device=model.device)]

    def text_encoder(self, model: ImageModel, compute: Embed | None = None) -> TextEncoder:
        from pipeline.families.sd15.conditioning import CLIPText

        return CLIPText(model, compute or partial(self.embed, model))

    def embedding_widths(self, model: ImageModel) -> Mapping[str, int]:
        return {}

    def negative(self, model: ImageModel, wanted: ImageParameters) -> str | None:
        return wanted.negative_prompt or ""

    def condition(
        self, model: ImageModel, wanted: ImageParameters, found: Sequence[Embedding], prepare: Prepare
    ) -> Conditioning:
        from pipeline.families.sd15.conditioning import condition

        return condition(wanted, found, prepare)

    def example(
        self, model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int = 1
    ) -> dict[str, torch.Tensor]:
        import torch

        shape = (rows, model.parts["tokenizer"].model_max_length, width)
        return {"kv": torch.randn(shape, device=model.device, dtype=model.dtype, generator=generator)}


FAMILY: Family = SD15()
