"""Program calls for transformers: RMSNorm, rotary positions, paged attention, rows gathered and moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.kernels.cpu import calls
from core.kernels.cpu.arguments import as_floats, check, dtype_for, ends, modulation, pointer
from core.kernels.cpu.program import Program
from core.kernels.kv_cache import PAGE


@dataclass(frozen=True, eq=False)
class TokenPositions:
    """The positions of a forward's rows: int32 positions [rows] and sequences [rows], which index rows of `table`.

    `table` [sequences, pages] holds the numbers of a sequence's pages, in order.
    """

    positions: Tensor
    sequences: Tensor
    table: Tensor


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """One layer's keys [pages, kv_heads, d, 16] and values [pages, kv_heads, 16, d] in fp32.

    Or in int8 with fp32 scales [pages, kv_heads, 16] for each token and head.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class TokenProgram(Program):
    """A program whose rows are tokens. Positions, sequences and page numbers are not checked when it runs."""

    def quantize_rows(self, x: Tensor, within: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Floats [rows, channels] to bytes, each row by its own largest magnitude, and the scales [rows] of these.

        `within` is (inverse [channels], images int32 [B]): bytes are as `quantize` makes them, with a scale of 1, but
        for rows that are beyond their range and of an image that is not 0. These are divided by their scale, and fit.
        """
        rows, channels = x.shape
        inverse, images = (None, None) if within is None else within
        count = 1 if images is None else images.shape[0]
        check("x", x, rows, channels)
        check("inverse", inverse, channels)
        check("within", images, count, dtype=torch.int32)
        if rows % count:
            raise ValueError(f"quantize_rows: {rows} rows are not those of {count} images")
        out, scales = self.buffer(rows, channels, dtype=torch.uint8), self.buffer(rows)
        call = calls.Quantize(
            x=x.data_ptr(), inverse=pointer(inverse), bytes=out.data_ptr(), scales=scales.data_ptr(),
            within=pointer(images), rows=rows, channels=channels, tokens=rows // count,
        )  # fmt: skip
        self._add(call, x, inverse, images, out, scales)
        return out, scales

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        inverse: Tensor | None,
        *,
        row_scale: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """RMSNorm of [rows, channels]; bytes with `inverse` [channels], else floats.

        `row_scale` [images, channels], `residual` [rows, channels] and `out` as in `layer_norm`.
        """
        rows, channels = x.shape
        weight = as_floats("RMSNorm without weight", weight)
        check("x", x, rows, channels)
        check("weight", weight, channels)
        check("inverse", inverse, channels)
        after = modulation("rms_norm", x, row_scale, residual)
        out = self._out(out, rows, channels, inverse)
        self._add(
            calls.RmsNorm(
                x=x.data_ptr(), weight=weight.data_ptr(), **ends(out, inverse), **after,
                rows=rows, channels=channels, eps=eps,
            ),
            x, weight, row_scale, residual, inverse, out,
        )  # fmt: skip
        return out

    def rotate(
        self,
        qkv: Tensor,
        angles: Tensor,
        places: TokenPositions,
        layer: PagedLayer,
        *,
        heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Rotate queries and keys of qkv [rows, (heads + 2 · kv_heads) · d]; put keys and values into their pages.

        `angles` [positions, d] holds d/2 cosines and then d/2 sines. With `q_norm` and `k_norm` [d] each head passes an
        RMSNorm before. Returns the rotated queries [rows, heads · d], a slice of `qkv`.
        """
        rows, _, kv_heads, d, _ = self._paged("rotate", qkv.shape[0], places, layer, heads)
        check("qkv", qkv, rows, (heads + 2 * kv_heads) * d)
        check("angles", angles, angles.shape[0], d)
        q_norm, k_norm = _head_norm("q_norm", q_norm, d), _head_norm("k_norm", k_norm, d)
        self._add(
            calls.Rotate(
                **_at(places, layer, heads), qkv=qkv.data_ptr(), angles=angles.data_ptr(),
                q_norm=pointer(q_norm), k_norm=pointer(k_norm), eps=eps,
            ),
            qkv, angles, q_norm, k_norm, places, layer,
        )  # fmt: skip
        return qkv[:, : heads * d]

    def rotate_heads(
        self,
        q: Tensor,
        k: Tensor,
        angles: Tensor,
        *,
        heads: int,
        kv_heads: int | None = None,
        positions: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        interleaved: bool = False,
    ) -> None:
        """Rotate q [rows, heads · d] and k [rows, kv_heads · d] in place; both may be slices of one tensor.

        `angles` holds d/2 cosines and then d/2 sines for each row, [rows, d]; or for each position, [n, d], with int32
        `positions` [rows], which are not checked when the program runs. With `q_norm` and `k_norm` [d] each head passes
        an RMSNorm before. `interleaved` turns neighbouring channels (2c, 2c + 1), else channels c and c + d/2.
        """
        kv_heads = kv_heads or heads
        rows, width = q.shape
        d = width // heads
        if d % 16 or not d or d * heads != width:
            raise ValueError(f"rotate_heads: {heads} heads in {width} channels: their width must be a multiple of 16")
        check("q", q, rows, width, rows_apart=True)
        check("k", k, rows, kv_heads * d, rows_apart=True)
        check("angles", angles, rows if positions is None else angles.shape[0], d)
        check("positions", positions, rows, dtype=torch.int32)
        q_norm, k_norm = _head_norm("q_norm", q_norm, d), _head_norm("k_norm", k_norm, d)
        self._add(
            calls.RotateHeads(
                q=q.data_ptr(), k=k.data_ptr(), q_norm=pointer(q_norm), k_norm=pointer(k_norm),
                angles=angles.data_ptr(), positions=pointer(positions), rows=rows, heads=heads, kv_heads=kv_heads, d=d,
                q_stride=q.stride(0), k_stride=k.stride(0), eps=eps, interleaved=int(interleaved),
            ),
            q, k, angles, positions, q_norm, k_norm,
        )  # fmt: skip

    def paged_attention(
        self,
        q: Tensor,
        places: TokenPositions,
        layer: PagedLayer,
        *,
        heads: int,
        scale: float,
        inverse: Tensor | None,
        window: int = 0,
        cap: float = 0.0,
    ) -> Tensor:
        """Attention of q [rows, heads · d], which may be a slice, each row on its sequence up to its own position.

        `window` and `cap` as in tokens.h; 0: none.
        """
        rows, _, _, d, _ = self._paged("paged_attention", q.shape[0], places, layer, heads)
        check("q", q, rows, heads * d, rows_apart=True)
        check("inverse", inverse, heads * d)
        out = self.buffer(rows, heads * d, dtype=dtype_for(inverse is not None))
        self._add(
            calls.PagedAttention(
                **_at(places, layer, heads), q=q.data_ptr(), **ends(out, inverse), q_stride=q.stride(0), window=window,
                scale=scale, cap=cap,
            ),
            q, places, layer, inverse, out,
        )  # fmt: skip
        return out

    def embed(
        self,
        table: Tensor,
        indices: Tensor,
        *,
        scale: float = 1.0,
        positions: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rows `indices` of `table` [n, channels], in fp32 or bf16, times `scale`, as floats [rows, channels].

        Indices are int32 [rows] and not checked when the program runs. `positions` [tokens, channels] is added to the
        rows of each image. A buffer as table gathers its rows.
        """
        (rows,), (count, channels) = indices.shape, table.shape
        dtype = torch.bfloat16 if table.dtype == torch.bfloat16 else torch.float32
        check("table", table, count, channels, dtype=dtype, rows_apart=True)
        check("indices", indices, rows, dtype=torch.int32)
        tokens = rows if positions is None else positions.shape[0]
        check("positions", positions, tokens, channels)
        if not tokens or rows % tokens:
            raise ValueError(f"embed: {rows} rows are no multiple of {tokens} positions")
        out = self._out(out, rows, channels, None)
        self._add(
            calls.Embed(
                table=table.data_ptr(), indices=indices.data_ptr(), positions=pointer(positions),
                floats=out.data_ptr(), rows=rows, channels=channels, tokens=tokens, stride=table.stride(0), scale=scale,
                bf16=int(dtype == torch.bfloat16),
            ),
            table, indices, positions, out,
        )  # fmt: skip
        return out

    def place(self, x: Tensor, out: Tensor, *, images: int, at: int = 0) -> None:
        """Write x [images · n, channels] into `out` [images · tokens, channels] from each image's row `at`.

        Floats or bytes; both may be slices, so that `out` may also be some channels of a wider tensor.
        """
        self._place("place", x, out, images, x.shape[0] // images, 0, at)

    def take(self, x: Tensor, *, images: int, at: int, rows: int) -> Tensor:
        """Rows `at` to `at + rows` of each image of x [images · tokens, channels], [images · rows, channels]."""
        out = self.buffer(images * rows, x.shape[1], dtype=x.dtype)
        self._place("take", x, out, images, rows, at, 0)
        return out

    def _place(self, name: str, x: Tensor, out: Tensor, images: int, rows: int, first: int, at: int) -> None:
        """Copy `rows` rows of each image, from row `first` of x to row `at` of `out`."""
        dtype = torch.uint8 if x.dtype == torch.uint8 else torch.float32
        check("x", x, *x.shape, dtype=dtype, rows_apart=True)
        check("out", out, out.shape[0], x.shape[1], dtype=dtype, rows_apart=True)
        row_counts, room = x.shape[0] // images, out.shape[0] // images
        if x.shape[0] % images or out.shape[0] % images:
            raise ValueError(f"{name}: {x.shape[0]} and {out.shape[0]} rows are not those of {images} images")
        if min(first, at) < 0 or not 0 < rows <= min(row_counts - first, room - at):
            raise ValueError(f"{name}: {rows} rows from {first} of {row_counts} do not fit from {at} of {room}")
        size, x_row, out_row = (count * dtype.itemsize for count in (x.shape[1], x.stride(0), out.stride(0)))
        self._add(
            calls.Place(
                x=x.data_ptr() + first * x_row, out=out.data_ptr() + at * out_row, images=images, rows=rows,
                size=size, x_row=x_row, x_image=row_counts * x_row, out_row=out_row, out_image=room * out_row,
            ),
            x, out,
        )  # fmt: skip

    @staticmethod
    def _paged(
        argument: str, rows: int, places: TokenPositions, layer: PagedLayer, heads: int
    ) -> tuple[int, int, int, int, torch.dtype]:
        """Rows, pages, kv_heads, d and type. Raises ValueError for shapes that the kernels do not support."""
        pages, kv_heads, d, page = layer.keys.shape
        dtype = layer.keys.dtype
        if page != PAGE or d % 16 or heads % kv_heads:
            raise ValueError(
                f"{argument}: {heads} heads of width {d} on {kv_heads}, {page} a page, do not fit the kernels"
            )
        if (dtype == torch.int8) != (layer.key_scales is not None) or dtype not in (torch.int8, torch.float32):
            raise ValueError(f"{argument}: pages are fp32, or int8 with scales, not {dtype}")
        check("keys", layer.keys, pages, kv_heads, d, PAGE, dtype=dtype)
        check("values", layer.values, pages, kv_heads, PAGE, d, dtype=dtype)
        check("key_scales", layer.key_scales, pages, kv_heads, PAGE)
        check("value_scales", layer.value_scales, pages, kv_heads, PAGE)
        for name, tensor in (("positions", places.positions), ("sequences", places.sequences)):
            check(name, tensor, rows, dtype=torch.int32)
        check("table", places.table, *places.table.shape, dtype=torch.int32)
        return rows, pages, kv_heads, d, dtype


def _head_norm(name: str, weight: Tensor | None, d: int) -> Tensor | None:
    """The weights [d] of an RMSNorm of heads, in fp32."""
    floats = None if weight is None else as_floats(name, weight)
    check(name, floats, d)
    return floats


def _at(places: TokenPositions, layer: PagedLayer, heads: int) -> dict[str, int | None]:
    _, kv_heads, d, _ = layer.keys.shape
    return {
        "positions": places.positions.data_ptr(),
        "sequences": places.sequences.data_ptr(),
        "table": places.table.data_ptr(),
        "keys": layer.keys.data_ptr(),
        "values": layer.values.data_ptr(),
        "key_scales": pointer(layer.key_scales),
        "value_scales": pointer(layer.value_scales),
        "rows": places.positions.shape[0],
        "heads": heads,
        "kv_heads": kv_heads,
        "d": d,
        "table_stride": places.table.stride(0),
    }
