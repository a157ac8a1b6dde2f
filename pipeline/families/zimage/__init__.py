"""Z-Image (Tongyi-MAI, 2025): a single-stream transformer trained by flow matching, which reads Qwen3.

`guidance_scale` is as in diffusers' `ZImagePipeline`: positive + scale · (positive - negative), off at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from contract.card import ImageDefaults
from pipeline import tiny_zimage
from pipeline.families.family import Adapters, Embed, Family, ImageModel, Prepare, Seeded, Size, TextProjection
from pipeline.families.zimage.adapters import ZImageAdapters
from pipeline.families.zimage.parts import PARTS, TOKENS, check, image_tokens, multiple, native
from pipeline.folder import Part

if TYPE_CHECKING:
    import torch

    from contract.image import ImageParameters
    from core.quant.convert import Recipe
    from pipeline.denoise import Conditioning, DenoiserInputs
    from pipeline.encode import Embedding, TextEncoder

_BLOCK = 32  # the transformer pads texts to multiples of this many tokens


class Unprojected:
    """`TextProjection` of a transformer that reads the text encoder's hidden states themselves."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class ZImage:
    """`Family` for Z-Image. Its defaults are those of Z-Image-Turbo."""

    label = "Z-Image"
    pipelines: tuple[str, ...] = ("ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline")
    parts: Mapping[str, Part] = PARTS
    denoiser = "transformer"
    quantized: tuple[str, ...] = ("transformer", "vae")
    samplers: tuple[str, ...] = ("flow-euler",)
    defaults = ImageDefaults(steps=8, guidance_scale=0.0, guided_above=0.0)
    weighting = False
    padded: Mapping[str, int] = {"text": _BLOCK}
    adapters: Adapters = ZImageAdapters()

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

    def negative(self, model: ImageModel, wanted: ImageParameters) -> str | None:
        return wanted.negative_prompt or ""

    def condition(
        self, model: ImageModel, wanted: ImageParameters, found: Sequence[Embedding], prepare: Prepare
    ) -> Conditioning:
        from pipeline.families.zimage.conditioning import condition

        return condition(wanted, found, prepare)

    def prepare(self, model: ImageModel) -> TextProjection:
        return Unprojected(model.denoiser.config.cap_feat_dim)

    def example(self, model: ImageModel, width: int, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        from pipeline.families.zimage.conditioning import example

        return example(model, width, rows, generator)

    def call(
        self, network: Callable[..., tuple[torch.Tensor, ...]], inputs: DenoiserInputs, *before: Any
    ) -> tuple[torch.Tensor, ...]:
        """As diffusers' transformer is called: lists of latents and of texts, each of its own length."""
        import torch

        texts, lengths = inputs.conditioning["text"], inputs.conditioning["lengths"].tolist()
        latents = list(inputs.sample.unsqueeze(2).unbind())  # of one frame
        own = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        made, *more = network(*before, latents, inputs.timestep, own, return_dict=False)
        return (torch.stack(list(made)).squeeze(2), *more)


FAMILY: Family = ZImage()
