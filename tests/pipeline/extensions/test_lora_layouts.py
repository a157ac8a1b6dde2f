"""Every layout of LoRA files that is about is read, as what its tool means, or refused by a sentence with a key."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from pipeline.extensions import lora_file
from tests.pipeline import loras
from tests.pipeline.lora_layouts import (
    ADAPTER,
    DIFFUSERS,
    DORA,
    DORA_INPUTS,
    DORA_LOKR,
    DORA_PEFT,
    FULL,
    KOHYA,
    LAYOUTS,
    LOCON_TUCKER,
    LOHA,
    LOHA_TUCKER,
    LOKR,
    LOKR_FACTORED,
    LOKR_TUCKER,
    PEFT,
    PROCESSOR,
    REFUSED,
    SHAPE,
    TEXT_OLD,
    TEXT_OLDEST,
    Layout,
)  # fmt: skip

RANK, ALPHA = 2, 3.0
_SCALED = ("lora_up.weight", "lora_B.weight", "lokr_w2")  # one factor of each product


@functools.cache
def model() -> ImageModel:
    """Tiny, of SDXL's blocks."""
    tiny.SHAPES["random:test-layouts"] = SHAPE
    return load("random:test-layouts")


class Draw:
    """Random tensors, one after another."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


_PAIRS = {  # the endings of down and of up
    KOHYA: (".lora_down.weight", ".lora_up.weight"),
    PEFT: (".lora_A.weight", ".lora_B.weight"),
    ADAPTER: (".lora_A.default_0.weight", ".lora_B.default_0.weight"),
    DIFFUSERS: (".lora.down.weight", ".lora.up.weight"),
    PROCESSOR: ("_lora.down.weight", "_lora.up.weight"),
    TEXT_OLD: (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
    TEXT_OLDEST: ("_lora.down.weight", "_lora.up.weight"),
}


def written(style: str, weight: Tensor, draw: Draw) -> tuple[dict[str, Tensor], Tensor]:
    """The endings of a layer's keys with tensors, and what its weight gets."""
    out, width, *sides = weight.shape
    scale, alpha = ALPHA / RANK, {".alpha": torch.tensor(ALPHA)}
    if style in _PAIRS:
        down, up = draw(RANK, width, *sides), draw(out, RANK, *[1] * len(sides))
        delta = up.flatten(1) @ down.flatten(1)
        made = dict(zip(_PAIRS[style], (down, up), strict=True))
        return ({**made, **alpha}, scale * delta) if style == KOHYA else (made, delta)
    if style in (DORA, DORA_INPUTS, DORA_PEFT, DORA_LOKR):
        return _decomposed(style, weight, draw)
    if style == FULL:
        delta = draw(*weight.shape)
        return {".diff": delta}, delta
    if style == LOCON_TUCKER:
        down, mid, up = draw(RANK, width, 1, 1), draw(RANK, RANK, *sides), draw(out, RANK, 1, 1)
        delta = torch.einsum("oi,ijkl,jc->ockl", up.flatten(1), mid, down.flatten(1))
        return {".lora_down.weight": down, ".lora_mid.weight": mid, ".lora_up.weight": up, **alpha}, scale * delta
    if style == LOHA:
        a, b = (draw(out, RANK) for _ in range(2)), (draw(RANK, width * math.prod(sides)) for _ in range(2))
        (a1, a2), (b1, b2) = a, b
        made = {".hada_w1_a": a1, ".hada_w1_b": b1, ".hada_w2_a": a2, ".hada_w2_b": b2}
        return {**made, **alpha}, scale * (a1 @ b1) * (a2 @ b2)
    if style == LOHA_TUCKER:
        made, halves = {}, []
        for n in (1, 2):
            t, a_, b_ = draw(RANK, RANK, *sides), draw(RANK, out), draw(RANK, width)
            made |= {f".hada_t{n}": t, f".hada_w{n}_a": a_, f".hada_w{n}_b": b_}
            halves.append(torch.einsum("ijkl,jr,ip->prkl", t, b_, a_))
        return {**made, **alpha}, scale * halves[0] * halves[1]
    return _kronecker(style, weight, draw, scale, alpha)


def _decomposed(style: str, weight: Tensor, draw: Draw) -> tuple[dict[str, Tensor], Tensor]:
    """DoRA as LyCORIS (`apply_weight_decompose`) and peft (`DoraLinearLayer`) compute it, row by row."""
    plain = {DORA_PEFT: PEFT, DORA_LOKR: LOKR}.get(style, KOHYA)
    made, delta = written(plain, weight, draw)
    merged = weight.float() + 0.1 * delta.view(weight.shape)
    made = {ending: 0.1 * tensor if ending.endswith(_SCALED) else tensor for ending, tensor in made.items()}
    if style == DORA_INPUTS:
        magnitude = draw(1, weight.shape[1], *[1] * (weight.dim() - 2)).abs()
        norms = [merged[:, column].norm() for column in range(weight.shape[1])]
        changed = torch.stack([merged[:, n] * magnitude.flatten()[n] / norm for n, norm in enumerate(norms)], dim=1)
        return {**made, ".dora_scale": magnitude}, changed - weight.float()
    magnitude = draw(len(weight)).abs()
    changed = torch.stack([row * m / row.norm() for row, m in zip(merged, magnitude, strict=True)])
    if style == DORA_PEFT:  # a convolution's is [1, out, 1, 1]
        shaped = magnitude if weight.dim() == 2 else magnitude.view(1, -1, 1, 1)
        return {**made, ".lora_magnitude_vector": shaped}, changed - weight.float()
    return {**made, ".dora_scale": magnitude.view(-1, *[1] * (weight.dim() - 1))}, changed - weight.float()


def _kronecker(
    style: str, weight: Tensor, draw: Draw, scale: float, alpha: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    out, width, *sides = weight.shape
    (o1, o2), (w1, w2) = ((2, side // 2) if side % 2 == 0 else (1, side) for side in (out, width))
    if style == LOKR:
        first, second = draw(o1, w1), draw(o2, w2, *sides)
        delta = torch.kron(first.view(o1, w1, *[1] * len(sides)), second)
        return {".lokr_w1": first, ".lokr_w2": second, **alpha}, delta
    if style == LOKR_FACTORED:
        a1, b1, a2, b2 = draw(o1, RANK), draw(RANK, w1), draw(o2, RANK), draw(RANK, w2 * math.prod(sides))
        made = {".lokr_w1_a": a1, ".lokr_w1_b": b1, ".lokr_w2_a": a2, ".lokr_w2_b": b2}
        return {**made, **alpha}, scale * torch.kron(a1 @ b1, a2 @ b2)
    assert style == LOKR_TUCKER
    first, t, a, b = draw(o1, w1), draw(RANK, RANK, *sides), draw(RANK, o2), draw(RANK, w2)
    second = torch.einsum("ijkl,ip,jr->prkl", t, a, b).contiguous()
    made = {".lokr_w1": first, ".lokr_t2": t, ".lokr_w2_a": a, ".lokr_w2_b": b}
    return {**made, **alpha}, scale * torch.kron(first[:, :, None, None], second)


def file_of(layout: Layout) -> tuple[bytes, dict[tuple[str, str], Tensor]]:
    tensors: dict[str, Tensor] = {}
    expected, draw = {}, Draw()
    for name, (part, path) in layout.layers.items():
        begin = max((begin for begin in layout.styles if name.startswith(begin)), key=len)
        keys, delta = written(layout.styles[begin], loras.layer(model(), part, path).weight, draw)
        tensors |= {name + ending: tensor.contiguous() for ending, tensor in keys.items()}
        expected[part, path.removeprefix("text_model.")] = delta
    return save(tensors, {"format": "pt"}), expected


def read(data: bytes) -> Any:
    return lora_file.read("x", data, model().parts, model().family.adapters)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_as_its_tool_means_it(name: str) -> None:
    data, expected = file_of(LAYOUTS[name])
    found = {(part, path.removeprefix("text_model.")): factor for (part, path), factor in read(data).items()}
    assert found.keys() == expected.keys()
    for at, factor in found.items():
        delta = factor.scale * factor.up.flatten(1) @ factor.down.flatten(1)
        torch.testing.assert_close(delta, expected[at].reshape(delta.shape), rtol=1e-4, atol=1e-4, msg=str(at))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_none_for_sdxl_is_refused_by_a_key(name: str) -> None:
    keys, said = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        read(save({key: torch.ones(2, 2) for key in keys}))
    told = str(caught.value)
    assert told.startswith("lora x: does not fit (") and said in told
    assert any(key in told or key.rpartition(".")[0] in told or _bare(key) in told for key in keys), told


def _bare(key: str) -> str:
    """A layer's name without its part and its factor's."""
    return key.partition(".")[2].partition(".lora_")[0]


def test_a_layer_under_both_names_is_read_once() -> None:
    """As diffusers does, by its own name: some files hold both."""
    down, up = torch.randn(2, 4, 3, 3), torch.randn(16, 2, 1, 1)
    other = {
        "lora_unet_input_blocks_0_0.lora_down.weight": 2 * down,
        "lora_unet_input_blocks_0_0.lora_up.weight": up.clone(),
    }
    own = {"lora_unet_conv_in.lora_down.weight": down, "lora_unet_conv_in.lora_up.weight": up}
    for state in ({**own, **other}, {**other, **own}):
        (factor,) = read(save(state)).values()
        assert torch.equal(factor.down, down)


def test_an_alpha_of_several_numbers_is_refused() -> None:
    state = {"lora_unet_conv_in.alpha": torch.ones(2), "lora_unet_conv_in.lora_down.weight": torch.ones(2, 4, 3, 3)}
    with pytest.raises(ModelError, match=r"'lora_unet_conv_in.alpha' is no number"):
        read(save(state))
