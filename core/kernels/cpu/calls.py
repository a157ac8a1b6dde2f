"""The argument structures of the C++ kernels, field by field as in their headers."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar


def _fields(**kinds: str) -> list[tuple[str, Any]]:
    """Names and types in the order given."""
    types = {"pointers": ctypes.c_void_p, "longs": ctypes.c_int64, "ints": ctypes.c_int32, "floats": ctypes.c_float}
    return [(name, types[kind]) for kind, names in kinds.items() for name in names.split()]


class Product(ctypes.Structure):
    """product.h"""

    KIND: ClassVar[int] = 0
    _fields_: ClassVar[Any] = _fields(
        pointers="a w offset scale bias row_bias residual inverse a_scale bytes floats branches rows",
        longs="images height width channels n a_stride row_stride",
        ints="kind taps stride before upsample cut_height cut_width geglu act",
    )


class Quantize(ctypes.Structure):
    """norm.h"""

    KIND: ClassVar[int] = 1
    _fields_: ClassVar[Any] = _fields(pointers="x inverse bytes scales within", longs="rows channels tokens")


_MODULATION = _fields(pointers="row_scale residual", longs="tokens scale_stride")


class LayerNorm(ctypes.Structure):
    """norm.h"""

    KIND: ClassVar[int] = 2
    _fields_: ClassVar[Any] = [
        *_fields(pointers="x weight bias inverse bytes floats"), *_MODULATION,
        *_fields(longs="rows channels", floats="eps"),
    ]  # fmt: skip


class GroupNorm(ctypes.Structure):
    """norm.h"""

    KIND: ClassVar[int] = 3
    _fields_: ClassVar[Any] = _fields(
        pointers="x y weight bias inverse bytes floats", longs="images pixels c1 c2 groups", floats="eps", ints="silu"
    )


class Attention(ctypes.Structure):
    """attention.h"""

    KIND: ClassVar[int] = 4
    _fields_: ClassVar[Any] = _fields(
        pointers="q k v inverse lengths bytes floats",
        longs="images heads kv_heads tokens keys d q_stride k_stride v_stride",
        floats="scale",
        ints="causal",
    )


class RmsNorm(ctypes.Structure):
    """tokens.h"""

    KIND: ClassVar[int] = 5
    _fields_: ClassVar[Any] = [
        *_fields(pointers="x weight inverse bytes floats"), *_MODULATION,
        *_fields(longs="rows channels", floats="eps"),
    ]  # fmt: skip


_PAGED = _fields(
    pointers="positions sequences table keys values key_scales value_scales",
    longs="rows heads kv_heads d table_stride",
)


class Rotate(ctypes.Structure):
    """tokens.h"""

    KIND: ClassVar[int] = 6
    _fields_: ClassVar[Any] = [*_PAGED, *_fields(pointers="qkv angles q_norm k_norm", floats="eps")]


class PagedAttention(ctypes.Structure):
    """tokens.h"""

    KIND: ClassVar[int] = 7
    _fields_: ClassVar[Any] = [
        *_PAGED, *_fields(pointers="q inverse bytes floats", longs="q_stride window", floats="scale cap")
    ]  # fmt: skip


class RotateHeads(ctypes.Structure):
    """rotary.h"""

    KIND: ClassVar[int] = 8
    _fields_: ClassVar[Any] = _fields(
        pointers="q k q_norm k_norm angles positions",
        longs="rows heads kv_heads d q_stride k_stride",
        floats="eps",
        ints="interleaved",
    )


class Embed(ctypes.Structure):
    """rows.h"""

    KIND: ClassVar[int] = 9
    _fields_: ClassVar[Any] = _fields(
        pointers="table indices positions floats", longs="rows channels tokens stride", floats="scale", ints="bf16"
    )


class Place(ctypes.Structure):
    """rows.h"""

    KIND: ClassVar[int] = 10
    _fields_: ClassVar[Any] = _fields(pointers="x out", longs="images rows size x_row x_image out_row out_image")


class Branch(ctypes.Structure):
    """branch.h"""

    KIND: ClassVar[int] = 11
    _fields_: ClassVar[Any] = _fields(pointers="down offset scale up spans", longs="groups")


class BranchUse(ctypes.Structure):
    """branch.h"""

    KIND: ClassVar[int] = 12
    _fields_: ClassVar[Any] = _fields(ints="branch", floats="scale")


class BranchRows(ctypes.Structure):
    """branch.h"""

    KIND: ClassVar[int] = 13
    _fields_: ClassVar[Any] = _fields(pointers="uses first", longs="images")


class Mixture(ctypes.Structure):
    """mixture.h"""

    KIND: ClassVar[int] = 14
    _fields_: ClassVar[Any] = _fields(
        pointers="a scores gated down residual out gathered hidden results",
        longs="rows channels inner experts top size",
        ints="normalized",
    )


class Call(ctypes.Structure):
    """program.cpp"""

    _fields_: ClassVar[Any] = [("kind", ctypes.c_int64), ("arguments", ctypes.c_void_p)]


STRUCTURES = (
    Product, Quantize, LayerNorm, GroupNorm, Attention, RmsNorm, Rotate, PagedAttention, RotateHeads, Embed, Place,
    Branch, BranchUse, BranchRows, Mixture,
)  # fmt: skip
