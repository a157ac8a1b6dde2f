"""An SDXL UNet as programs of CPU kernels, one for each number of rows and size, whole and as DeepCache's shallow end.

Cross-attention reads keys and values that were computed once (pipeline.denoise.PackedKeys). A row's bits depend neither
on the number of rows nor on its place among them. Supports the layout of diffusers' UNet2DConditionModel.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from core.ops.packed import PackedLayer, PackedLayers
from unet_opt.deepcache import Features, shapes
from unet_opt.program_builder import FeatureMap, ProgramBuilder, Watch


class UNetPrograms:
    """Runs a UNet at any number of rows, by one thread at a time.

    Weights are packed at once; programs are built on first use, in milliseconds, and kept.
    """

    def __init__(self, library: ctypes.CDLL, unet: Any, *, half: bool = False) -> None:
        """Raises ValueError for a UNet without SDXL's layout. `half` as for `PackedLayers`."""
        check(unet)
        self.unet = unet
        self.library = library
        self.watch: Watch | None = None  # called for each layer of every run, which makes runs slower
        self.layers = PackedLayers(library, unet, half=half)
        resnets = [module for module in unet.modules() if type(module).__name__ == "ResnetBlock2D"]
        self.time_at: dict[int, tuple[int, int]] = {}
        at = 0
        for resnet in resnets:
            self.time_at[id(resnet)] = (at, at + resnet.time_emb_proj.out_features)
            at += resnet.time_emb_proj.out_features
        # Every block's share of the time embedding in one product.
        self.times = self.layers.floats(*(resnet.time_emb_proj for resnet in resnets))
        self.kv_at: dict[int, int] = {}
        self.kv_width = 0
        projections: list[Any] = []
        for name in unet.attn_processors:
            attn = unet.get_submodule(name.removesuffix(".processor"))
            if attn.is_cross_attention:
                self.kv_at[id(attn)] = self.kv_width
                self.kv_width += 2 * attn.to_out[0].in_features
                projections += [attn.to_k, attn.to_v]
        self._projections = self.layers.floats(*projections)
        self._keys: dict[int, tuple[ProgramBuilder, Tensor, Tensor]] = {}
        self._programs: dict[tuple[str, int, int, int], UNetProgram] = {}
        self._lock = threading.Lock()  # programs share their buffers among runs
        self._multiple = 2 ** (len(unet.config.block_out_channels) - 1)
        UNetProgram(self, "", 1, self._multiple, self._multiple)  # packs all layers, and finds any unsupported ones

    def __call__(
        self,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor, ...]:
        """As `deepcache.SplitUNet.deep`, with packed keys and values [B, T, width] for hidden states, in fp32.

        `sample` [B, C, h, w] to the model's output [B, C, h, w] and features [B, h, w, channels]. Features lie in
        buffers that the next call of any program of this UNet overwrites. Raises ValueError for shapes that do not fit.
        """
        assert not return_dict
        return self._run("", (), sample, timestep, encoder_hidden_states, timestep_cond, added_cond_kwargs)

    def shallow(
        self,
        depth: str,
        features: Features,
        sample: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor, ...]:
        """As `deepcache.SplitUNet.shallow`, with `kept` features [B, h, w, channels] of an earlier call."""
        assert not return_dict
        return self._run(depth, features, sample, timestep, encoder_hidden_states, timestep_cond, added_cond_kwargs)

    def keys(self, hidden: Tensor) -> Tensor:
        """Keys and values of all cross-attention layers, as `PackedKeys` has them: fp32 [B, T, D] to [B, T, width]."""
        rows, tokens, width = hidden.shape
        count = rows * tokens
        with self._lock:
            if count not in self._keys:
                writer = ProgramBuilder(self.library, self.layers, 1)
                start = writer.program.buffer(count, width)
                self._keys[count] = writer, start, writer.linear(start, self._projections)
            writer, start, out = self._keys[count]
            start.copy_(hidden.reshape(count, width))
            writer.program.run()
            return out.view(rows, tokens, -1).clone()

    def _run(
        self,
        depth: str,
        features: Features,
        sample: Tensor,
        timestep: Tensor,
        kv: Tensor,
        timestep_cond: Tensor | None,
        added_cond_kwargs: dict[str, Tensor] | None,
    ) -> tuple[Tensor, ...]:
        assert added_cond_kwargs is not None
        unet, (rows, channels, height, width) = self.unet, sample.shape
        if channels != unet.config.in_channels or height % self._multiple or width % self._multiple:
            raise ValueError(
                f"sample {[*sample.shape]} does not fit: {unet.config.in_channels} channels and sides that are "
                f"multiples of {self._multiple} are wanted"
            )
        time = unet.get_time_embed(sample, timestep)
        if timestep_cond is not None:
            time = time + unet.time_embedding.cond_proj(timestep_cond)
        sizes = unet.add_time_proj(added_cond_kwargs["time_ids"].flatten()).reshape(rows, -1)
        added = torch.cat([added_cond_kwargs["text_embeds"].float(), sizes], dim=-1)
        key = (depth, rows, height, width)
        with self._lock:
            if key not in self._programs:
                self._programs[key] = UNetProgram(self, *key)
            return self._programs[key](sample, time, added, kv, features)

    @property
    def size_bytes(self) -> tuple[int, dict[tuple[str, int, int, int], int]]:
        """Bytes of packed weights, and of the buffers of each (depth, rows, height, width), which overlap."""
        buffers = {key: program.writer.program.size_bytes for key, program in self._programs.items()}
        return self.layers.size_bytes, buffers


class UNetProgram:
    """The UNet at `rows` rows of latents of one size: all of it, or what a shallow step of `depth` computes."""

    def __init__(self, programs: UNetPrograms, depth: str, rows: int, height: int, width: int) -> None:
        unet = programs.unet
        self.writer = w = ProgramBuilder(programs.library, programs.layers, rows)
        self._programs, self._rows = programs, rows
        self._skips: list[FeatureMap] = []
        self._features: list[FeatureMap] = []
        self._sample = w.program.buffer(rows * height * width, unet.config.in_channels)
        self._time = w.program.buffer(rows, unet.time_embedding.linear_1.in_features)
        self._added = w.program.buffer(rows, unet.add_embedding.linear_1.in_features)
        self._times = self._embed(unet, programs.times)
        grid = FeatureMap(self._sample, height, width)
        h = FeatureMap(w.product(grid, w.layers.floats(unet.conv_in)), height, width)
        self._shallow = bool(depth)
        self._out = self._walk_shallow(unet, h, depth) if depth else self._walk(unet, h)
        self._shape = (rows, height, width)

    def __call__(
        self, sample: Tensor, time: Tensor, added: Tensor, kv: Tensor, features: Features
    ) -> tuple[Tensor, ...]:
        self._sample.view(self._rows, *sample.shape[2:], -1).copy_(sample.permute(0, 2, 3, 1))
        self._time.copy_(time)
        self._added.copy_(added)
        self._bind(kv)
        maps = [feature.x.view(*self._shape, -1) for feature in self._features]
        if self._shallow:
            for given, own in zip(features, maps, strict=True):
                own.copy_(given)
        self.writer.run(self._programs.watch)
        out = self._out.view(*self._shape, -1).permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        return (out,) if self._shallow else (out, *maps)

    def _bind(self, kv: Tensor) -> None:
        """Point cross-attention at these keys and values, [B, T, width] as PackedKeys lays them out."""
        wanted = (self._rows, max(1, kv.shape[1]), self._programs.kv_width)
        if kv.dtype != torch.float32 or not kv.is_contiguous() or kv.shape != wanted or kv.device.type != "cpu":
            raise ValueError(
                f"keys and values must be contiguous fp32 [{wanted[0]}, tokens, {wanted[2]}] on the CPU, "
                f"not {kv.dtype} {[*kv.shape]} on {kv.device}"
            )
        self._kv = kv  # kept while the program may read it
        start, tokens, width = kv.data_ptr(), kv.shape[1], kv.shape[2]
        for call, name, d in self.writer.cross:
            at = start + 4 * self._programs.kv_at[name]
            call.k, call.v = at, at + 4 * d
            call.keys, call.k_stride, call.v_stride = tokens, width, width

    def _embed(self, unet: Any, times: PackedLayer) -> Tensor:
        """What each residual block adds of time, size and pooled text, [rows, sum over blocks]."""
        w, time, added = self.writer, unet.time_embedding, unet.add_embedding
        hidden = w.linear(self._time, w.layers.floats(time.linear_1), act="silu")
        emb = w.linear(hidden, w.layers.floats(time.linear_2))
        hidden = w.linear(self._added, w.layers.floats(added.linear_1), act="silu")
        return w.linear(w.linear(hidden, w.layers.floats(added.linear_2), residual=emb, act="silu"), times)

    def _resnet(self, h: FeatureMap, skip: FeatureMap | None, block: Any) -> FeatureMap:
        first, last = self._programs.time_at[id(block)]
        made = self.writer.resnet(h, skip, block, self._times[:, first:last])
        return self._next(h, made if skip is None else self._next(skip, made))

    def _transformer(self, h: FeatureMap, block: Any) -> FeatureMap:
        return self._next(h, self.writer.transformer(h, block))

    def _next(self, before: FeatureMap, after: FeatureMap) -> FeatureMap:
        """Nothing reads `before` again, unless it is a pending skip or a feature."""
        if not any(before.x is kept.x for kept in (*self._skips, *self._features)):
            self.writer.program.give_back(before.x)
        return after

    def _walk(self, unet: Any, h: FeatureMap) -> Tensor:
        w, skips = self.writer, self._skips
        skips.append(h)
        for block in unet.down_blocks:
            attentions = getattr(block, "attentions", None)
            for i, resnet in enumerate(block.resnets):
                h = self._resnet(h, None, resnet)
                if attentions:
                    h = self._transformer(h, attentions[i])
                skips.append(h)
            if block.downsamplers:
                h = w.downsample(h, block.downsamplers[0])
                skips.append(h)
        h = self._resnet(h, None, unet.mid_block.resnets[0])
        for attention, resnet in zip(unet.mid_block.attentions, unet.mid_block.resnets[1:], strict=True):
            h = self._resnet(self._transformer(h, attention), None, resnet)
        for block in unet.up_blocks[:-1]:
            h = self._up(h, block, len(block.resnets))
            if block.upsamplers:
                h = self._next(h, w.upsample(h, block.upsamplers[0]))
        last = unet.up_blocks[-1]
        self._features = [h, *skips[:0:-1]]
        h = self._up(h, last, len(last.resnets) - 1, of=0)
        self._features.append(h)
        return self._head(unet, self._up(h, last, 1))

    def _walk_shallow(self, unet: Any, h: FeatureMap, depth: str) -> Tensor:
        rows, last = self._rows, unet.up_blocks[-1]
        self._features = [
            FeatureMap(self.writer.program.buffer(rows * height * width, channels), height, width)
            for channels, height, width in shapes(unet, depth, h.height, h.width)
        ]
        first, *skips = self._features
        self._skips += [h, *skips[::-1]]
        return self._head(unet, self._up(first, last, len(self._skips)))

    def _up(self, h: FeatureMap, block: Any, count: int, *, of: int | None = None) -> FeatureMap:
        """So many of an up block's residual blocks: the last ones, or those from `of` on."""
        attentions = getattr(block, "attentions", None)
        first = len(block.resnets) - count if of is None else of
        for i in range(first, first + count):
            h = self._resnet(h, self._skips.pop(), block.resnets[i])
            if attentions:
                h = self._transformer(h, attentions[i])
        return h

    def _head(self, unet: Any, h: FeatureMap) -> Tensor:
        w = self.writer
        last = w.layers(unet.conv_out)
        a = w.program.group_norm(h.x, None, unet.conv_norm_out, images=self._rows, silu=True, inverse=last.inverse)
        return w.product(h._replace(x=a), last)


_WANTED: dict[str, tuple[Any, ...]] = {
    "addition_embed_type": ("text_time",),
    "act_fn": ("silu", "swish"),
    "time_embedding_type": ("positional",),
    "resnet_time_scale_shift": ("default",),
    "attention_type": ("default",),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "only_cross_attention": (False,),
    "dual_cross_attention": (False,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "encoder_hid_dim_type": (None,),
    "center_input_sample": (False,),
    "time_embedding_act_fn": (None,),
    "timestep_post_act": (None,),
    "upcast_attention": (False, None),
    "resnet_out_scale_factor": (1.0,),
    "mid_block_scale_factor": (1.0,),
    "resnet_skip_time_act": (False,),
    "cross_attention_norm": (None,),
    "time_embedding_dim": (None,),
}


def check(unet: Any) -> None:
    """Reject, by name, what these programs would compute differently from diffusers. Raises ValueError."""
    config = unet.config
    for name, allowed in _WANTED.items():
        if getattr(config, name, allowed[0]) not in allowed:
            raise ValueError(f"unet: {name} is {getattr(config, name)!r}; the native kernels support {allowed[0]!r}")
    kinds = {*config.down_block_types, *config.up_block_types}
    known = {"DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"}
    if kinds - known:
        raise ValueError(f"unet: the native kernels do not support {', '.join(sorted(kinds - known))}")
    for name, module in unet.named_modules():
        if type(module).__name__ != "Attention":
            continue
        if (module.inner_dim // module.heads) % 16:
            raise ValueError(f"unet {name}: heads of width {module.inner_dim // module.heads} are no multiple of 16")
        for what in ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "residual_connection"):
            if getattr(module, what, None):
                raise ValueError(f"unet {name}: {what} is set, which the native kernels do not support")
        if module.rescale_output_factor != 1:
            raise ValueError(f"unet {name}: rescale_output_factor is {module.rescale_output_factor}, not 1")
