"""What a class takes, read from its signature."""

from __future__ import annotations

from typing import Any, Optional

import diffusers
import pytest

from pipeline.families.diffusers.signature import CallSignature


class _Pipeline:
    def __call__(
        self, prompt: str | list[str], height: int | None = None, num_inference_steps: int = 12, scale: float = 2,
        flag: bool = True, count: Optional[int] = None, words: str | list[str] = "a", corner: tuple[int, int] = (0, 0),  # noqa: UP045
        sizes: list[int] | None = None, attention_kwargs: dict[str, Any] | None = None, _private: int = 1,
        guidance_scale: float | None = None, prompt_embeds: Any = None, output_type: str = "pil",
    ) -> None: ...  # fmt: skip


def test_single_values_are_options_and_all_else_is_not() -> None:
    signature = CallSignature(_Pipeline)
    assert signature.options == {
        "scale": {"type": "number", "default": 2}, "flag": {"type": "boolean", "default": True},
        "count": {"type": "integer"}, "words": {"type": "string", "default": "a"},
    }  # fmt: skip
    assert signature.fields == ("steps", "guidance_scale")
    assert (signature.defaults.steps, signature.defaults.guidance_scale) == (12, 1.0)


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        ("StableDiffusion3Pipeline", True), ("KandinskyV22CombinedPipeline", True), ("FluxFillPipeline", True),
        ("KandinskyV22Pipeline", False), ("WanPipeline", False), ("StableAudioPipeline", False),
        ("MarigoldDepthPipeline", False), ("DDPMPipeline", False),
    ],
)  # fmt: skip
def test_classes_that_need_more_or_return_something_else_do_not_draw(name: str, draws: bool) -> None:
    assert CallSignature(getattr(diffusers, name)).draws is draws


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("Flux2KleinPipeline", True), ("Flux2Pipeline", True), ("QwenImageEditPlusPipeline", True),
        ("QwenImageEditPipeline", False), ("FluxKontextPipeline", False), ("FluxPipeline", False),
    ],
)  # fmt: skip
def test_a_list_of_pictures_is_no_batch_in_some_classes(name: str, several: bool) -> None:
    assert CallSignature(getattr(diffusers, name)).takes_several is several
