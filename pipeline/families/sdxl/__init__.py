"""SDXL (Podell et al., 2023): a UNet that reads two CLIP text encoders, and models of its shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contract.card import ImageDefaults, Size
from contract.prompts import FIELDS
from pipeline.checkpoints import sdxl, tiny
from pipeline.checkpoints.folder import Part
from pipeline.families.family import Adapters, Embed, Family, ImageModel, Network, Prepare, Seeded
from pipeline.families.sdxl.adapters import SDXLAdapters
from pipeline.families.sdxl.parts import PARTS, check, grid, native, text_encoders, tokenizers
from pipeline.sampling.samplers import SCHEDULERS

if TYPE_CHECKING:
    import torch

    from contract.image import ImageParameters
    from core.ops.ops import Lowering
    from core.quant.convert import Recipe
    from pipeline.sampling.denoise import Conditioning
    from pipeline.text.encode import Embedding, TextEncoder


class SDXL:
    """`Family` for SDXL. Options: `force_zeros`, whether an absent negative prompt is a zero embedding."""

    label = "SDXL"
    pipelines: tuple[str, ...] = (
        "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline",
    )  # fmt: skip
    parts: Mapping[str, Part] = PARTS
    denoiser = "unet"
    quantized: tuple[str, ...] = ("unet", "vae")
    samplers = SCHEDULERS
    defaults = ImageDefaults(steps=20, guidance_scale=5.0, guided_above=1.0)
    prompt_fields: Collection[str] = FIELDS
    padded: Mapping[str, int] = {}
    longest: Mapping[str, int] = {}
    calibration: Mapping[str, Any] = {}
    language_model: str | None = None
    adapters: Adapters = SDXLAdapters()
    controls = True
    image_prompts = True

    def seeded(self, name: str) -> Seeded | None:
        if name == sdxl.NAME:
            return Seeded(sdxl.parts, True, {"force_zeros": True})
        if name not in tiny.SHAPES:
            return None
        shape = tiny.SHAPES[name]
        return Seeded(lambda device: tiny.parts(shape), False, {"force_zeros": shape.force_zeros})

    def options(self, index: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"force_zeros": bool(index.get("force_zeros_for_empty_prompt", True))}

    def check(self, name: str, parts: Mapping[str, Any]) -> None:
        check(name, parts)

    def native(self, model: ImageModel) -> int:
        return native(model)

    def multiple(self, model: ImageModel) -> int:
        return model.vae_scale

    def grid(self, model: ImageModel) -> int:
        return grid(model)

    def image_tokens(self, model: ImageModel, size: Size) -> int:
        return 0

    @property
    def alpha(self) -> float:
        from unet_opt.recipe import ALPHA

        return ALPHA

    def recipes(self, parts: Mapping[str, Any], alpha: float | None) -> dict[str, Recipe]:
        from unet_opt import recipe

        return {"unet": recipe.unet(parts["unet"], alpha=alpha), "vae": recipe.decoder(parts["vae"])}

    def rows(self, model: ImageModel, wanted: ImageParameters) -> int:
        """Distilled models take the guidance scale as an input, in one row."""
        distilled = model.denoiser.config.time_cond_proj_dim is not None
        return 1 if distilled else self.defaults.rows(wanted.guidance_scale)

    def embed(self, model: ImageModel, ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        from pipeline.families.sdxl.conditioning import embed

        return embed(model, ids)

    def example_ids(self, model: ImageModel, rows: int) -> list[torch.Tensor]:
        import torch

        lengths = [tokenizer.model_max_length for tokenizer in tokenizers(model)]
        return [torch.zeros(rows, length, dtype=torch.long, device=model.device) for length in lengths]

    def text_encoder(self, model: ImageModel, compute: Embed | None = None) -> TextEncoder:
        from pipeline.families.sdxl.conditioning import CLIPPair

        return CLIPPair(model, compute)

    def embedding_widths(self, model: ImageModel) -> Mapping[str, int]:
        from pipeline.families.sdxl.conditioning import KEYS

        encoders = text_encoders(model)
        return {key: encoder.config.hidden_size for key, encoder in zip(KEYS[-len(encoders) :], encoders, strict=True)}

    def negative(self, model: ImageModel, wanted: ImageParameters) -> str | None:
        return "" if wanted.negative_prompt is None and not model.options["force_zeros"] else wanted.negative_prompt

    def condition(
        self, model: ImageModel, wanted: ImageParameters, found: Sequence[Embedding], prepare: Prepare
    ) -> Conditioning:
        from pipeline.families.sdxl.conditioning import condition

        return condition(model, wanted, found, prepare, self.rows(model, wanted))

    def check_network(self, model: ImageModel, *, head_multiple: int = 1) -> None:
        from unet_opt.layout import check_unet

        check_unet(model.denoiser, head_multiple=head_multiple)

    def network(self, lowering: Lowering, model: ImageModel) -> Network:
        from unet_opt.deepcache import SplitUNet

        return SplitUNet(lowering, model.denoiser)

    def example(
        self, model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int = 1
    ) -> dict[str, torch.Tensor]:
        from pipeline.families.sdxl.conditioning import example

        return example(model, width, rows, generator, chunks)


FAMILY: Family = SDXL()
