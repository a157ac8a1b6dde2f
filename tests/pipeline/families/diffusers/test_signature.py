"""What a class takes, read from its signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import diffusers
import pytest

from contract.image import ImageParameters
from pipeline.families.diffusers.signature import CallSignature


class _Pipeline:
    def __call__(
        self, prompt: str | list[str], height: int | None = None, num_inference_steps: int = 12,
        mu: Optional[float] = 2, use_pe: bool = True, count: int = 1, prompt_3: str | list[str] = "a",  # noqa: UP045
        std: list[float] | None = None,
        max_sequence_length: int = 77, aesthetic_score: int = 6, max_area: int = 1024**2, unknown: float = 1.0,
        prior_callback_on_step_end: Callable[[Any, int, dict[str, int]], None] | None = None,
        guidance_scale: float | None = None, prompt_embeds: Any = None, output_type: str = "pil",
    ) -> None: ...  # fmt: skip


def test_single_values_on_the_list_are_options_and_all_else_is_not() -> None:
    signature = CallSignature(_Pipeline)
    assert signature.options == {
        "mu": {"type": "number", "default": 2, "minimum": -100.0, "maximum": 100.0},
        "use_pe": {"type": "boolean", "default": True}, "prompt_3": {"type": "string", "default": "a"},
        "max_sequence_length": {"type": "integer", "default": 77, "minimum": 1, "maximum": 77},
    }  # fmt: skip
    assert signature.fields == ("steps", "guidance_scale")
    assert (signature.defaults.steps, signature.defaults.guidance_scale) == (12, 1.0)


def test_a_size_is_drawn_as_it_is_asked_for() -> None:
    """HunyuanDiT takes the nearest of its table and does not scale it back, as PixArt does."""
    parameters = ImageParameters("a", 1, 96, 64)
    assert CallSignature(diffusers.HunyuanDiTPipeline).arguments(parameters)["use_resolution_binning"] is False
    assert "use_resolution_binning" not in CallSignature(diffusers.PixArtSigmaPipeline).arguments(parameters)
    assert "another size" in CallSignature(diffusers.StableDiffusionUpscalePipeline).refusal


@pytest.mark.parametrize(
    "name",
    [
        "FluxKontextPipeline", "LatentConsistencyModelPipeline", "OmniGenPipeline", "StableDiffusion3Pipeline",
        "HunyuanDiTPipeline", "StableDiffusionXLControlNetPipeline",
    ],
)  # fmt: skip
def test_of_numbers_all_have_bounds_and_counts_are_not_offered(name: str) -> None:
    for option, schema in CallSignature(getattr(diffusers, name)).options.items():
        if schema["type"] in ("number", "integer"):
            assert schema["minimum"] <= schema.get("default", 1) <= schema["maximum"]
            assert schema["type"] == "number" or option == "max_sequence_length"
        assert "size" not in option and "area" not in option


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("StableDiffusion3Pipeline", ""), ("FluxFillPipeline", ""), ("PixArtSigmaPipeline", ""),
        ("HunyuanImagePipeline", ""), ("HunyuanImageRefinerPipeline", ""),  # their annotations are texts
        ("KandinskyV22Pipeline", "alone"), ("MarigoldDepthPipeline", "alone"), ("DDPMPipeline", "alone"),
        ("WanPipeline", "pictures"), ("StableAudioPipeline", "pictures"), ("AudioLDMPipeline", "pictures"),
        ("TextToVideoSDPipeline", "pictures"), ("StableDiffusionLDM3DPipeline", "pictures"),
        ("ShapEPipeline", "pictures"),
        ("PixArtSigmaPAGPipeline", "networks"), ("StableDiffusionXLPAGPipeline", "networks"),
        ("HunyuanDiTPAGPipeline", "networks"), ("StableDiffusion3PAGImg2ImgPipeline", "networks"),
        ("KandinskyV22CombinedPipeline", "further pipelines"), ("StableCascadeCombinedPipeline", "further pipelines"),
    ],
)  # fmt: skip
def test_classes_that_do_not_share_an_engine_or_draw_are_refused_with_the_reason(name: str, reason: str) -> None:
    refusal = CallSignature(getattr(diffusers, name)).refusal
    assert reason in refusal and bool(refusal) == bool(reason)


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("Flux2KleinPipeline", True), ("Flux2Pipeline", True), ("QwenImageEditPlusPipeline", True),
        ("QwenImageEditPipeline", False), ("FluxKontextPipeline", False), ("FluxPipeline", False),
    ],
)  # fmt: skip
def test_a_list_of_pictures_is_no_batch_in_some_classes(name: str, several: bool) -> None:
    assert CallSignature(getattr(diffusers, name)).takes_several is several
