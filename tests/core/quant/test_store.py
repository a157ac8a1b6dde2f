"""Quantized models on disk: both forms come back bit for bit, and what does not fit is refused with the reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from contract.precision import IMAGE_SCHEMES, SCHEMES
from core.quant import store
from core.quant.convert import Recipe, Rule, quantize_
from core.quant.linear import ScaledWeights
from core.quant.store import MANIFEST, WEIGHTS, Manifest, QuantizedStoreError, load_, read_manifest, round_, save
from tests.core.quant.blocks import Block, block, inputs, observed, observed_two, recipe
from tests.core.quant.stage import TwoLayers, normal


def manifest(model: nn.Module, scheme: str = "int8") -> Manifest:
    layers = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, ScaledWeights)}
    return Manifest(scheme, "block", "digest", layers, {"head": "left"}, {"prompts": 3})


def fresh(scheme: str) -> Block | TwoLayers:
    return block() if scheme in IMAGE_SCHEMES else TwoLayers()


def made(scheme: str = "int8", *, alpha: float | None = 0.5) -> Any:
    model = fresh(scheme)
    two = Recipe("two", (Rule("first|second", alpha=alpha),))
    wanted, seen = (
        (recipe(), observed(model)) if isinstance(model, Block) else (two, observed_two(model, normal(3, 9, 300)))
    )
    quantize_(model, wanted, seen, scheme=scheme)  # type: ignore[arg-type]
    return model


def stored(folder: Path, *, weights: bool = True) -> Block:
    model = made()
    save(model, folder, manifest(model), weights=weights)
    return model  # type: ignore[no-any-return]


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone().view(torch.uint8) for name, tensor in model.state_dict().items()}


def check_equal(found: nn.Module, wanted: nn.Module) -> None:
    a, b = bits(found), bits(wanted)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert repr(found) == repr(wanted)
    with torch.inference_mode():
        x = inputs(9) if isinstance(found, Block) else normal(9, 5, 300)
        assert torch.equal(found(x), wanted(x))


CASES = [(whole, scheme, 0.5) for whole in (True, False) for scheme in SCHEMES if whole or scheme != "int8-sparse"]


@pytest.mark.parametrize(("weights", "scheme", "alpha"), [*CASES, (True, "w4a16", None)])
def test_what_was_saved_comes_back_bit_for_bit(weights: bool, scheme: str, alpha: float | None, tmp_path: Path) -> None:
    """But for the matrices of layers that are not quantized, which a file has in bf16."""
    model, again = made(scheme, alpha=alpha), fresh(scheme)
    size = save(model, tmp_path, manifest(model, scheme), weights=weights)
    found = load_(again, tmp_path, source="digest")
    round_(model)
    check_equal(again, model)
    assert (found.scheme, found.weights, found.skipped) == (scheme, weights, {"head": "left"})
    assert found.calibration == {"prompts": 3} and found == read_manifest(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {MANIFEST, WEIGHTS}
    channels = sum(m.inverse.numel() for m in model.modules() if getattr(m, "inverse", None) is not None)
    assert size == (tmp_path / WEIGHTS).stat().st_size and (weights or size < 4 * channels + 2000)


def test_rounding_keeps_vectors_and_what_is_quantized() -> None:
    model = made()
    before = copy.deepcopy(model)
    round_(model)
    assert torch.equal(model.to_q.scale, before.to_q.scale) and torch.equal(model.norm.weight, before.norm.weight)
    assert torch.equal(model.head.weight, before.head.weight.bfloat16().float())
    assert not torch.equal(model.head.weight, before.head.weight)
    assert torch.equal(model.head.bias, before.head.bias)


def test_a_model_in_bf16_loads_too(tmp_path: Path) -> None:
    stored(tmp_path)
    again = block().bfloat16()
    load_(again, tmp_path)
    assert again.head.weight.dtype == torch.bfloat16 and again.to_q.scale.dtype == torch.float32
    with torch.inference_mode():
        assert again(inputs(9).bfloat16()).dtype == torch.bfloat16


def test_saving_again_replaces(tmp_path: Path) -> None:
    stored(tmp_path, weights=False)
    model = stored(tmp_path)
    again = block()
    assert load_(again, tmp_path).weights
    round_(model)
    check_equal(again, model)


def test_a_manifest_of_other_layers_than_the_models_is_not_written(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(QuantizedStoreError, match="names other layers than those that are quantized"):
        save(model, tmp_path / "a", replace(manifest(model), layers={"conv": "Int8Conv2d"}))
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = made()
    with pytest.raises(QuantizedStoreError, match="cannot be written"):
        save(model, tmp_path / "file" / "a", manifest(model))


Damage = Callable[[Path], object]


def rewrite(**changes: Any) -> Damage:
    """Other words in the manifest; None takes one away."""

    def damage(folder: Path) -> None:
        whole = {**json.loads((folder / MANIFEST).read_text()), **changes}
        (folder / MANIFEST).write_text(json.dumps({name: v for name, v in whole.items() if v is not None}))

    return damage


def refile(change: Callable[[dict[str, Tensor]], object], *, honest: bool = True) -> Damage:
    """Other tensors; `honest` writes their digest into the manifest."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)
        if honest:
            rewrite(sha256=store._sha256(folder / WEIGHTS))(folder)

    return damage


def relabel(name: str, kind: str) -> Damage:
    return lambda folder: rewrite(layers={**read_manifest(folder).layers, name: kind})(folder)


def overwrite(name: str, contents: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(contents)


def flip(folder: Path) -> None:
    *rest, last = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(bytes([*rest, last ^ 1]))


@pytest.mark.quick
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("damage", "options", "said"),
    [
        (lambda folder: None, {"source": "other"}, "was quantized from other weights than the model's"),
        (flip, {}, "is not the file that quantization.json describes: damaged or replaced"),
        (refile(lambda t: t.clear(), honest=False), {}, "damaged or replaced"),
        (lambda folder: (folder / WEIGHTS).unlink(), {}, "cannot be read"),
        (lambda folder: (folder / MANIFEST).unlink(), {}, "quantization.json is missing"),
        (overwrite(MANIFEST, b"{"), {}, "is not JSON"),
        (overwrite(MANIFEST, b"\xff\xfe"), {}, "is not JSON"),
        (overwrite(MANIFEST, b"[]"), {}, "must hold a JSON object"),
        (rewrite(format=2), {}, "format 2 is not known, only 1"),
        (rewrite(format=None), {}, "format None is not known, only 1"),
        (rewrite(layers=["conv"]), {}, r"is damaged \(no layers\)"),
        (rewrite(layers={"conv": 3}), {}, r"is damaged \(no kinds of layers\)"),
        (rewrite(sha256=None), {}, r"is damaged \(no sha256\)"),
        (rewrite(weights="yes"), {}, r"is damaged \(no weights\)"),
        (relabel("conv", "Int4Conv2d"), {}, "layer conv is of the unknown kind 'Int4Conv2d'"),
        (relabel("conv", "Int8Linear"), {}, "layer conv is a Conv2d in the model, but the manifest has Int8Linear"),
        (relabel("norm", "Int8Linear"), {}, "layer norm is a GroupNorm in the model, but the manifest has Int8Linear"),
        (relabel("ghost", "Int8Linear"), {}, "the model has no layer ghost"),
        (refile(lambda t: t.pop("to_q.inverse")), {}, "inverse of layer to_q is missing"),
        (refile(lambda t: t.update({"to_q.inverse": torch.ones(31)})), {},
         r"layer to_q does not fit the model's: inverse is \[31\], not \[32\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_changed(
    damage: Damage, options: dict[str, Any], said: str, weights: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "unet-int8"
    stored(folder, weights=weights)
    damage(folder)
    model = block()
    with pytest.raises(QuantizedStoreError, match=said) as caught:
        load_(model, folder, **{"source": "digest", **options})
    assert "unet-int8" in str(caught.value)
    check_equal(model, block())


@pytest.mark.parametrize(
    ("lost", "changed", "said"),
    [
        ("to_q.weight", {}, "weight of layer to_q is missing"),
        ("conv.scale", {}, "scale of layer conv is missing"),
        ("to_q.bias", {}, "bias of layer to_q is missing"),
        ("", {"conv.weight": torch.ones(32, 3, 3, 31, dtype=torch.int8)}, r"weight is \[32, 3, 3, 31\]"),
        ("head.bias", {}, r"does not fit the model \(first difference: head.bias\)"),
        ("", {"ghost.weight": torch.ones(2)}, r"does not fit the model \(first difference: ghost.weight\)"),
        ("", {"head.weight": torch.ones(4, 31)}, r"head.weight is \[4, 31\], and \[4, 32\] in the model"),
    ],
)
def test_weights_that_do_not_fit_are_refused(lost: str, changed: dict[str, Tensor], said: str, tmp_path: Path) -> None:
    stored(tmp_path)
    refile(lambda tensors: (tensors.pop(lost, None), tensors.update(changed)))(tmp_path)
    model = block()
    with pytest.raises(QuantizedStoreError, match=said):
        load_(model, tmp_path)
    check_equal(model, block())


@pytest.mark.parametrize(
    ("weights", "model", "options", "said"),
    [
        (False, block(), {}, "holds scales alone, so the digest of the model's weights must be known"),
        # Rounded ones would be quantized into another model.
        (False, block().bfloat16(), {"source": "digest"}, "for weights in fp32, and layer conv is torch.bfloat16"),
        (True, Block(width=48), {}, "layer conv does not fit the model's"),
    ],
)
def test_other_models_are_refused(weights: bool, model: Block, options: Any, said: str, tmp_path: Path) -> None:
    stored(tmp_path, weights=weights)
    with pytest.raises(QuantizedStoreError, match=said):
        load_(model, tmp_path, **options)
