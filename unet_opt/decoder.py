"""SDXL's VAE decoder as programs of CPU kernels, one for each number of latents and size.

Supports the layout of diffusers' AutoencoderKL. Scaling of latents and rounding of pixels are the caller's.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from torch import Tensor

from core.ops.packed import PackedLayers
from unet_opt.program_builder import FeatureMap, ProgramBuilder, Watch


class DecoderPrograms:
    """Runs a VAE's decoder at any number of latents, by one thread at a time.

    An image's bits do not depend on the rest of its batch.
    """

    def __init__(self, library: ctypes.CDLL, vae: Any, *, half: bool = False) -> None:
        """Raises ValueError for a decoder without SDXL's layout. `half` as for `PackedLayers`."""
        check(vae)
        self.vae = vae
        self.library = library
        self.watch: Watch | None = None  # called for each layer of every run, which makes runs slower
        self.layers = PackedLayers(library, vae, half=half)
        self._programs: dict[tuple[int, int, int], tuple[ProgramBuilder, Tensor, Tensor]] = {}
        self._lock = threading.Lock()  # programs share their buffers among runs
        self._write(1, 1, 1)  # packs all layers, and finds any unsupported ones

    def __call__(self, latents: Tensor) -> Tensor:
        """Latents [B, C, h, w] as the decoder reads them, to pixels [B, H, W, 3] in about [-1, 1], fp32.

        Raises ValueError for another number of channels.
        """
        rows, channels, height, width = latents.shape
        if channels != self.vae.config.latent_channels:
            raise ValueError(f"vae: latents have {channels} channels, not {self.vae.config.latent_channels}")
        key = (rows, height, width)
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._write(rows, height, width)
            writer, start, out = self._programs[key]
            start.view(rows, height, width, channels).copy_(latents.permute(0, 2, 3, 1))
            writer.run(self.watch)
            scale = 2 ** (len(self.vae.config.up_block_types) - 1)
            return out.view(rows, height * scale, width * scale, -1).clone()

    def _write(self, rows: int, height: int, width: int) -> tuple[ProgramBuilder, Tensor, Tensor]:
        vae, decoder = self.vae, self.vae.decoder
        w = ProgramBuilder(self.library, self.layers, rows)
        start = w.program.buffer(rows * height * width, vae.config.latent_channels)
        h = FeatureMap(start, height, width)
        if getattr(vae, "post_quant_conv", None) is not None:
            h = h._replace(x=w.linear(start, w.layers.floats(vae.post_quant_conv)))
        h = h._replace(x=w.product(h, w.layers.floats(decoder.conv_in)))
        mid = decoder.mid_block
        h = self._next(w, h, w.resnet(h, None, mid.resnets[0], None))
        for attention, resnet in zip(mid.attentions, mid.resnets[1:], strict=True):
            if attention is not None:
                h = w.attention(h, attention)
            h = self._next(w, h, w.resnet(h, None, resnet, None))
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                h = self._next(w, h, w.resnet(h, None, resnet, None))
            if block.upsamplers:
                h = self._next(w, h, w.upsample(h, block.upsamplers[0]))
        last = w.layers(decoder.conv_out)
        a = w.program.group_norm(h.x, None, decoder.conv_norm_out, images=rows, silu=True, inverse=last.inverse)
        out = w.product(h._replace(x=a), last)
        return w, start, out

    @staticmethod
    def _next(w: ProgramBuilder, before: FeatureMap, after: FeatureMap) -> FeatureMap:
        """Nothing reads `before` again: a decoder has no skips."""
        w.program.give_back(before.x)
        return after

    @property
    def size_bytes(self) -> int:
        """Bytes of packed weights."""
        return self.layers.size_bytes


_WANTED: dict[str, tuple[Any, ...]] = {"act_fn": ("silu", "swish"), "norm_type": ("group",)}


def check(vae: Any) -> None:
    """Reject, by name, what these programs would compute differently from diffusers. Raises ValueError."""
    if getattr(vae.config, "up_block_types", None) is None or not hasattr(vae.decoder, "conv_norm_out"):
        raise ValueError(f"vae: the native kernels support AutoencoderKL, not {type(vae).__name__}")
    kinds = {*vae.config.up_block_types} - {"UpDecoderBlock2D"}
    if kinds:
        raise ValueError(f"vae: the native kernels do not support {', '.join(sorted(kinds))}")
    for name, allowed in _WANTED.items():
        if getattr(vae.config, name, allowed[0]) not in allowed:
            raise ValueError(f"vae: {name} is {getattr(vae.config, name)!r}; the native kernels support {allowed[0]!r}")
    for name, module in vae.decoder.named_modules():
        if type(module).__name__ == "Attention" and (module.inner_dim // module.heads) % 16:
            width = module.inner_dim // module.heads
            raise ValueError(f"vae decoder.{name}: heads of width {width} are no multiple of 16")
