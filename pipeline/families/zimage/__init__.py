"""Z-Image (Tongyi-MAI, 2025): a single-stream transformer trained by flow matching, which reads Qwen3.

`guidance_scale` is as in diffusers' `ZImagePipeline`: positive + scale · (positive - negative), off at 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from contract.card import ImageDefaults, Size
from pipeline.checkpoints import tiny_zimage
from pipeline.checkpoints.folder import Part
from pipeline.families.family import Adapters, Embed, Family, ImageModel, Network, Prepare, Seeded
from pipeline.families.zimage.adapters import ZImageAdapters
from pipeline.families.zimage.parts import PARTS, TOKENS, check, image_tokens, multiple, native
from pipeline.sampling.samplers import FLOW_SCHEDULERS

if TYPE_CHECKING:
    import torch

    from contract.image import ImageParameters
    from core.ops.ops import Lowering
    from core.quant.convert import Recipe
    from pipeline.sampling.denoise import Conditioning
    from pipeline.text.encode import Embedding, TextEncoder

_BLOCK = 32  # the transformer pads texts to multiples of this many tokens


class ZImage:
    """`Family` for Z-Image. Its defaults are those of Z-Image-Turbo."""

    label = "Z-Image"
    pipelines: tuple[str, ...] = ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline")
    parts: Mapping[str, Part] = PARTS
    denoiser = "transformer"
    quantized: tuple[str, ...] = ("transformer", "vae")
    samplers = FLOW_SCHEDULERS
    defaults = ImageDefaults(steps=8, guidance_scale=0.0, guided_above=0.0)
    prompt_fields: Collection[str] = ()
    padded: Mapping[str, int] = {"text": _BLOCK}
    longest: Mapping[str, int] = {"text": TOKENS}
    calibration: Mapping[str, Any] = {"steps": 8, "watched_steps": 8, "guidance": 0.0}
    language_model: str | None = "text_encoder"
    adapters: Adapters = ZImageAdapters()
    controls = False
    image_prompts = False

    def seeded(self, name: str) -> Seeded | None:
        if name not in tiny_zimage.SHAPES:
            return None
        shape = tiny_zimage.SHAPES[name]
        return Seeded(lambda device: tiny_zimage.parts(shape), False, {})

    def options(self, index: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    def check(self, name: str, parts: Mapping[str, Any]) -> None:
        check(name, parts)

    def native(self, model: ImageModel) -> int:
        return native(model)

    def multiple(self, model: ImageModel) -> int:
        return multiple(model)

    def grid(self, model: ImageModel) -> int:
        return multiple(model)

    def image_tokens(self, model: ImageModel, size: Size) -> int:
        return image_tokens(model, size)

    @property
    def alpha(self) -> float:
        from pipeline.families.zimage.recipe import ALPHA

        return ALPHA

    def recipes(self, parts: Mapping[str, Any], alpha: float | None) -> dict[str, Recipe]:
        from pipeline.families.zimage.recipe import transformer
        from unet_opt import recipe

        return {"transformer": transformer(alpha), "vae": recipe.decoder(parts["vae"])}

    def rows(self, model: ImageModel, wanted: ImageParameters) -> int:
        return self.defaults.rows(wanted.guidance_scale)

    def embed(self, model: ImageModel, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        from pipeline.families.zimage.conditioning import embed

        return embed(model, ids)

    def example_ids(self, model: ImageModel, rows: int) -> list[torch.Tensor]:
        import torch

        return [torch.zeros(rows, TOKENS, dtype=torch.long, device=model.device)]

    def text_encoder(self, model: ImageModel, compute: Embed | None = None) -> TextEncoder:
        from pipeline.families.zimage.conditioning import ChatEncoder

        return ChatEncoder(model, compute or partial(self.embed, model))

    def embedding_widths(self, model: ImageModel) -> Mapping[str, int]:
        return {}

    def negative(self, model: ImageModel, wanted: ImageParameters) -> str | None:
        return wanted.negative_prompt or ""

    def condition(
        self, model: ImageModel, wanted: ImageParameters, found: Sequence[Embedding], prepare: Prepare
    ) -> Conditioning:
        from pipeline.families.zimage.conditioning import condition

        return condition(wanted, found, prepare)

    def check_network(self, model: ImageModel, *, head_multiple: int = 1) -> None:
        from pipeline.families.zimage.transformer import check

        check(model.denoiser, head_multiple=head_multiple)

    def network(self, lowering: Lowering, model: ImageModel) -> Network:
        from pipeline.families.zimage.transformer import ZImageNetwork

        return ZImageNetwork(lowering, model.denoiser)

    def example(
        self, model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int = 1
    ) -> dict[str, torch.Tensor]:
        from pipeline.families.zimage.conditioning import example

        return example(model, width, rows, generator)


FAMILY: Family = ZImage()
