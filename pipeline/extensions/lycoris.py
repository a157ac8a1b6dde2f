"""Rewrites LyCORIS's kinds of adapters as pairs of matrices, exactly: LoHa, LoKr, and LoCon in three factors.

Formulas are those of LyCORIS (Yeh et al., 2023). A pair is written as kohya's `lora_down`, `lora_up` and `alpha`; of a
convolution down is [rank, in · height · width]. A pair's rank is at most the smaller side of the layer's matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

_KINDS: dict[str, str] = {}  # the kind of adapter that an ending of a key belongs to
for _kind, _endings in {
    "LoHa": "hada_w1_a hada_w1_b hada_w2_a hada_w2_b hada_t1 hada_t2",
    "LoKr": "lokr_w1 lokr_w1_a lokr_w1_b lokr_w2 lokr_w2_a lokr_w2_b lokr_t1 lokr_t2",
    "LoCon": "lora_mid.weight",
}.items():
    _KINDS |= dict.fromkeys(_endings.split(), _kind)
_OTHERS = ("lora_down.weight", "lora_up.weight", "alpha", "scalar")


class PairTooLargeError(ValueError):
    """The pairs of a file have more elements than are allowed: small factors may stand for large matrices."""


class _Factor(NamedTuple):
    """A weight [out, …] as up [out, r] · down [r, …]."""

    up: Tensor
    down: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight, as a matrix."""
        return self.up.shape[0], self.down.numel() // max(1, self.down.shape[0])

    @property
    def dense(self) -> Tensor:
        """The weight as a matrix."""
        return self.up @ self.down.flatten(1)


def as_pairs(state: Mapping[str, Tensor], most: int) -> dict[str, Tensor]:
    """The same file with every LoHa, LoKr and three-factor LoCon as a LoRA; other keys are unchanged.

    Raises ValueError, naming the key, for factors that are missing or do not fit each other, and `PairTooLargeError`
    where the pairs would have more than `most` elements.
    """
    kinds: dict[str, str] = {}
    for key in state:
        prefix, ending = _split(key)
        if ending in _KINDS:
            kinds[prefix] = _KINDS[ending]
    if not kinds:
        return dict(state)
    pairs: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in kinds}
    for key, tensor in state.items():
        prefix, ending = _split(key)
        if prefix in kinds and (ending in _OTHERS or _KINDS.get(ending) == kinds[prefix]):
            layers[prefix][ending] = tensor
        else:
            pairs[key] = tensor
    for prefix, factors in layers.items():
        down, up, scale = _pair(prefix, kinds[prefix], factors, most)
        most -= down.numel() + up.numel()
        pairs[f"{prefix}.lora_down.weight"], pairs[f"{prefix}.lora_up.weight"] = down, up
        pairs[f"{prefix}.alpha"] = torch.tensor(scale * down.shape[0])
    return pairs


def _split(key: str) -> tuple[str, str]:
    """The layer's name in a key, and the factor's."""
    for ending in (*_KINDS, *_OTHERS):
        if key.endswith(f".{ending}"):
            return key[: -len(ending) - 1], ending
    return key, ""


def _pair(prefix: str, kind: str, factors: dict[str, Tensor], most: int) -> tuple[Tensor, Tensor, float]:
    """down, up and their scale."""
    alpha, scalar = factors.pop("alpha", None), factors.pop("scalar", None)
    shown = f"{kind} {prefix[:120]!a}"
    read: dict[str, Callable[[dict[str, Tensor], int], tuple[_Factor, int]]] = {
        "LoHa": _loha, "LoKr": _lokr, "LoCon": _locon,
    }  # fmt: skip
    try:
        (up, down), dim = read[kind]({name: tensor.float() for name, tensor in factors.items()}, most)
    except KeyError as error:
        raise ValueError(f"{shown} lacks {error.args[0]}") from error
    except PairTooLargeError as error:
        raise PairTooLargeError(f"{shown} needs more room than LoRAs have") from error
    except (RuntimeError, IndexError, ValueError) as error:
        shapes = ", ".join(f"{name} {[*tensor.shape]}" for name, tensor in factors.items())
        raise ValueError(f"the factors of {shown} do not fit each other: {shapes}") from error
    scale = float(alpha) / dim if alpha is not None and dim else 1.0
    return down.contiguous(), up.contiguous(), scale * (1.0 if scalar is None else float(scalar))


def _loha(f: dict[str, Tensor], most: int) -> tuple[_Factor, int]:
    """(a₁ b₁) ∘ (a₂ b₂): a product of the ups' and of the downs' pairs of ranks (Khatri-Rao)."""
    one, two = (_product(f.get(f"hada_t{n}"), f[f"hada_w{n}_a"], f[f"hada_w{n}_b"], most) for n in (1, 2))
    if one.shape != two.shape:
        raise ValueError("two shapes")
    rank = one.down.shape[0] * two.down.shape[0]
    if _thin(*one.shape, rank, most):
        up = (one.up[:, :, None] * two.up[:, None, :]).flatten(1)
        down = (one.down.flatten(1)[:, None] * two.down.flatten(1)[None, :]).view(rank, *one.down.shape[1:])
        factor = _Factor(up, down)
    else:
        factor = whole((one.dense * two.dense).view(-1, *one.down.shape[1:]))
    return factor, f["hada_w1_b"].shape[0]


def _lokr(f: dict[str, Tensor], most: int) -> tuple[_Factor, int]:
    """w₁ ⊗ w₂, each whole or a product: the Kronecker products of the ups and of the downs."""
    dim, factors = 0, []  # without a product there is no scale
    for n in (1, 2):
        if f"lokr_w{n}" in f:
            factors.append(whole(f[f"lokr_w{n}"]))
        else:
            factors.append(_product(f.get(f"lokr_t{n}"), f[f"lokr_w{n}_a"], f[f"lokr_w{n}_b"], most))
            dim = f[f"lokr_w{n}_b"].shape[0]
    one, two = factors
    rank = one.down.shape[0] * two.down.shape[0]
    out, width = (a * b for a, b in zip(one.shape, two.shape, strict=True))
    inner = (one.shape[1] * two.down.shape[1], *two.down.shape[2:])  # channels, and a convolution's sides
    if _thin(out, width, rank, most):
        down = torch.kron(one.down.flatten(1), two.down.flatten(1)).view(rank, *inner)
        return _Factor(torch.kron(one.up.contiguous(), two.up.contiguous()), down), dim
    return whole(torch.kron(one.dense, two.dense).view(out, *inner)), dim


def _locon(f: dict[str, Tensor], most: int) -> tuple[_Factor, int]:
    """up · mid · down, with mid [r, r, height, width]: mid and down are one convolution."""
    up, mid, down = f["lora_up.weight"], f["lora_mid.weight"], f["lora_down.weight"]
    return _product(mid, up.flatten(1).T, down.flatten(1), most), down.shape[0]


def _product(core: Tensor | None, a: Tensor, b: Tensor, most: int) -> _Factor:
    """a [out, r] · b [r, …]; with LyCORIS's core [r, r, height, width] Σ core · a · b, where a is [r, out]."""
    if core is None:
        factor = _Factor(a, b)
    else:
        if core.shape[0] * b.shape[1] * core.shape[2] * core.shape[3] > most:
            raise PairTooLargeError
        factor = _Factor(a.T, torch.einsum("ijkl,jc->ickl", core, b).contiguous())
    if factor.up.dim() != 2 or factor.down.dim() not in (2, 4) or factor.up.shape[1] != factor.down.shape[0]:
        raise ValueError("two ranks")
    return factor


def whole(weight: Tensor) -> _Factor:
    """Return a weight [out, …] as (up, down), a product of itself and an identity, whichever is smaller."""
    flat = weight.flatten(1)
    if flat.shape[0] <= flat.shape[1]:
        return _Factor(torch.eye(flat.shape[0]), weight)
    return _Factor(flat, torch.eye(flat.shape[1]).view(-1, *weight.shape[1:]))


def _thin(out: int, width: int, rank: int, most: int) -> bool:
    """Return whether a matrix [out, width] may need this rank. Raises `PairTooLargeError`."""
    if (out + width) * min(rank, out, width) > most:
        raise PairTooLargeError
    return rank <= min(out, width)
