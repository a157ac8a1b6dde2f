"""The stock SDXL pipeline with published helpers that skip work: PyPI's DeepCache and T-GATE, and diffusers' own hooks.

Each helper has a copy of the UNet, since most replace its methods. All run in fp32 on the CPU.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import CacheMixin, StableDiffusionXLPipeline
from diffusers.callbacks import SDXLCFGCutoffCallback
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
)
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from evaluation.pixels import Pixels

FULL = "full"
BROADCAST = {"spatial": 2, "cross": 6}  # as in the paper (PAB246; a UNet has no temporal attention)
_ROWS = ("sample", "encoder_hidden_states", "text_embeds", "time_ids")  # inputs with a row for each half of guidance

Call = Callable[..., Any]
"""A pipeline's call, by keywords."""
Make = Callable[[Any, int], Call]
"""The call of a pipeline with a helper, for pictures of so many steps. Raises `Missing`."""


class Missing(RuntimeError):
    """A helper is not installed, or does nothing for a UNet. The message has the reason."""


class StockPipeline:
    """The pipeline of a folder, for pictures of the model's own size."""

    def __init__(self, folder: Path, *, steps: int, guidance: float) -> None:
        logging.getLogger("diffusers").setLevel(logging.ERROR)
        self._pipeline = StableDiffusionXLPipeline.from_pretrained(str(folder), dtype=torch.float32)
        self._steps, self._guidance = steps, guidance
        self._embeddings: dict[str, dict[str, Tensor]] = {}

    def encode(self, prompt: str) -> None:
        """Encode the prompt for the pictures of all helpers."""
        names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
        with torch.inference_mode():
            self._embeddings[prompt] = dict(zip(names, self._pipeline.encode_prompt(prompt), strict=True))

    def helped(self, make: Make) -> Callable[[str, int], Pixels]:
        """What draws a prompt and a seed with this helper; the prompt was encoded. Raises `Missing`."""
        parts = self._pipeline.components
        own = {name: copy.deepcopy(parts[name]) for name in ("unet", "scheduler")}
        pipeline = StableDiffusionXLPipeline(**{**parts, **own}, add_watermarker=False)
        pipeline.set_progress_bar_config(disable=True)
        call = make(pipeline, self._steps)

        def draw(prompt: str, seed: int) -> Pixels:
            (picture,) = call(
                **self._embeddings[prompt], num_inference_steps=self._steps, guidance_scale=self._guidance,
                generator=torch.Generator().manual_seed(seed), output_type="np",
            ).images  # fmt: skip
            return (picture * 255).round().astype(np.uint8)  # type: ignore[no-any-return]

        return draw


# -- helpers on PyPI ---------------------------------------------------------------------------------------------------


def deepcache(pipeline: Any, steps: int, *, interval: int) -> Call:
    """PyPI's `DeepCache` (Ma et al., 2023): branch 0, uniform."""
    helper = _package("DeepCache").DeepCacheSDHelper(pipe=pipeline)
    helper.set_params(cache_interval=interval, cache_branch_id=0)

    def call(**given: Any) -> Any:
        helper.enable()
        try:
            return pipeline(**given)
        finally:
            helper.disable()

    return call


def tgate(pipeline: Any, steps: int, *, self_attention: bool) -> Call:
    """PyPI's `tgate` (Zhang et al., 2024): from half the steps on no guidance, and what cross-attention gave last.

    With `self_attention`, as by default, that is also reused, four steps of five before the gate. After the gate the
    one row has the *negative* prompt's pooled embedding and the mean of both rows' cross-attention.
    """
    loaded = _package("tgate").TgateSDXLLoader(pipeline)
    return partial(loaded.tgate, gate_step=steps // 2, **({} if self_attention else {"sp_interval": 1}))


def tgate_deepcache(pipeline: Any, steps: int, *, interval: int) -> Call:
    """Both: `tgate`'s own combination."""
    _package("DeepCache")
    loaded = _package("tgate").TgateSDXLDeepCacheLoader(pipeline, cache_interval=interval, cache_branch_id=0)
    return partial(loaded.tgate, gate_step=steps // 2)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(f"not installed: {error.name or error}") from error


# -- diffusers' own ----------------------------------------------------------------------------------------------------


def cutoff(pipeline: Any, steps: int) -> Call:
    """`SDXLCFGCutoffCallback`: half the steps without guidance. It ends guidance after the step of its index."""
    last = SDXLCFGCutoffCallback(cutoff_step_ratio=None, cutoff_step_index=max(1, steps // 2) - 1)
    return partial(pipeline, callback_on_step_end=last)


class HookedModel(CacheMixin, nn.Module):  # type: ignore[misc]
    """A UNet in the form that diffusers' caches want: a `CacheMixin` whose inputs are tensors with names.

    Its attention lies in `transformer_blocks`, which is how they find it, or as in the UNet. Stands in for the UNet's
    `forward`; `timestep` is that of the forward under way.
    """

    def __init__(self, unet: Any, *, listed: bool) -> None:
        super().__init__()
        self.timestep = 0.0
        if listed:
            blocks = [module for module in unet.modules() if isinstance(module, BasicTransformerBlock)]
            self.transformer_blocks = nn.ModuleList(blocks)
        else:
            for name, child in unet.named_children():
                self.add_module(name, child)
        self._whole, unet.forward = unet.forward, self._instead

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, text_embeds: Tensor, time_ids: Tensor
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._whole(
            sample, timestep, encoder_hidden_states,
            added_cond_kwargs={"text_embeds": text_embeds, "time_ids": time_ids}, return_dict=False,
        )  # fmt: skip
        return found

    def _instead(
        self, sample: Tensor, timestep: Tensor, *, added_cond_kwargs: Mapping[str, Tensor], **given: Any
    ) -> tuple[Tensor, ...]:
        self.timestep = float(timestep)
        text = given["encoder_hidden_states"]
        found: tuple[Tensor, ...] = self(
            sample=sample, timestep=timestep, encoder_hidden_states=text, **added_cond_kwargs
        )
        return found


def hooked(pipeline: Any, steps: int, *, config: Callable[[HookedModel, int], Any], listed: bool = True) -> Call:
    """One of diffusers' caches."""
    model: Any = HookedModel(pipeline.unet, listed=listed)
    wanted = config(model, steps)
    try:
        model.enable_cache(wanted)
    except (IndexError, ValueError) as error:
        raise Missing(f"wants one list of transformer blocks ({type(error).__name__}: {error})") from error
    if not any(hasattr(module, "_diffusers_hook") for name, module in model.named_modules() if name):
        raise Missing("wants one list of transformer blocks, and hooks nothing of a UNet")

    def call(**given: Any) -> Any:
        model._reset_stateful_cache()
        with model.cache_context("guided"):
            return pipeline(**given)

    return call


def _broadcast(model: HookedModel, steps: int) -> Any:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=BROADCAST["spatial"],
        cross_attention_block_skip_range=BROADCAST["cross"],
        current_timestep_callback=lambda: model.timestep,
    )


def _faster(model: HookedModel, steps: int) -> Any:
    return FasterCacheConfig(
        tensor_format="BCHW",
        current_timestep_callback=lambda: model.timestep,
        _unconditional_conditional_input_kwargs_identifiers=_ROWS,
    )


def _taylor(model: HookedModel, steps: int) -> Any:
    """Forecasts attention's outputs. Of the whole blocks it cannot: these return tuples of tuples."""
    return TaylorSeerCacheConfig(
        cache_interval=3, max_order=1, taylor_factors_dtype=torch.float32, cache_identifiers=[r".*attn[12]"]
    )


HELPERS: dict[str, Make] = {
    FULL: lambda pipeline, steps: pipeline,
    "DeepCache-2": partial(deepcache, interval=2),
    "DeepCache-3": partial(deepcache, interval=3),
    "cfg-cutoff": cutoff,
    "T-GATE": partial(tgate, self_attention=True),
    "T-GATE-cross": partial(tgate, self_attention=False),
    "T-GATE-DeepCache-2": partial(tgate_deepcache, interval=2),
    "PAB": partial(hooked, config=_broadcast),
    "FasterCache": partial(hooked, config=_faster),
    "TaylorSeer-3": partial(hooked, config=_taylor),
    "FirstBlockCache": partial(hooked, config=lambda model, steps: FirstBlockCacheConfig(), listed=False),
    "MagCache": partial(
        hooked,
        config=lambda model, steps: MagCacheConfig(num_inference_steps=steps, mag_ratios=[1.0] * steps),
        listed=False,
    ),
    "SeaCache": partial(hooked, config=lambda model, steps: SeaCacheConfig(), listed=False),
}
"""Helpers by name. The last three are for transformers; what they say to a UNet is recorded."""
