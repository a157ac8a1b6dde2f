"""SDXL's refiner (Podell et al., 2023, section 2.5): a UNet for the last steps of SDXL's pictures, with one encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints.folder import Part
from pipeline.families.family import Family, ImageModel, Prepare, Seeded
from pipeline.families.sdxl import SDXL
from pipeline.families.sdxl_refiner.parts import PARTS, check

if TYPE_CHECKING:
    import torch

    from contract.image import ImageParameters
    from pipeline.sampling.denoise import Conditioning
    from pipeline.text.encode import Embedding


class SDXLRefiner(SDXL):
    """`Family` for SDXL's refiner. What it does not define is as in SDXL."""

    label = "SDXL refiner"
    pipelines: tuple[str, ...] = ()  # found by `reads`
    parts: Mapping[str, Part] = PARTS

    def reads(self, index: Mapping[str, Any]) -> bool:
        """Whether this model_index.json is that of a refiner: an SDXL without a first text encoder."""
        return index.get("_class_name") in SDXL.pipelines and index.get("text_encoder") == [None, None]

    def seeded(self, name: str) -> Seeded | None:
        return None

    def check(self, name: str, parts: Mapping[str, Any]) -> None:
        check(name, parts)

    def condition(
        self, model: ImageModel, wanted: ImageParameters, found: Sequence[Embedding], prepare: Prepare
    ) -> Conditioning:
        from pipeline.families.sdxl_refiner.conditioning import condition

        return condition(model, wanted, found, prepare, self.rows(model, wanted))

    def example(
        self, model: ImageModel, width: int, rows: int, generator: torch.Generator, chunks: int = 1
    ) -> dict[str, torch.Tensor]:
        made = super().example(model, width, rows, generator, chunks)
        return {**made, "time_ids": made["time_ids"][:, :5].contiguous()}


FAMILY: SDXLRefiner = SDXLRefiner()
_: Family = FAMILY
