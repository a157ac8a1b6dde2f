"""LyCORIS's kinds of adapters as pairs of matrices: what peft's own modules add to a weight, in all their forms."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.extensions import lycoris
from pipeline.extensions.lycoris import PairTooLargeError, as_pairs
from tests.core.quant.stage import normal

NAME = "lora_unet_x"
ROOM = 10**7
LOHA = {"hada_w1_a": (6, 2), "hada_w1_b": (2, 7), "hada_w2_a": (6, 2), "hada_w2_b": (2, 7)}


def pair(state: dict[str, Tensor], most: int = ROOM) -> tuple[Tensor, Tensor, float]:
    """down, up and the scale that readers of kohya's layout give the layer."""
    made = as_pairs({f"{NAME}.{ending}": tensor for ending, tensor in state.items()}, most)
    assert made.keys() == {f"{NAME}.{ending}" for ending in ("lora_down.weight", "lora_up.weight", "alpha")}
    down, up = made[f"{NAME}.lora_down.weight"], made[f"{NAME}.lora_up.weight"]
    return down, up, float(made[f"{NAME}.alpha"]) / down.shape[0]


def added(state: dict[str, Tensor]) -> Tensor:
    down, up, scale = pair(state)
    return scale * up @ down.flatten(1)


def by_peft(kind: str, layer: nn.Module, **config: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Random factors of a layer in peft's module of this kind, and what it adds to the weight."""
    peft = pytest.importorskip("peft")
    made = {"LoHa": peft.LoHaConfig, "LoKr": peft.LoKrConfig}[kind](
        r=3, alpha=2, target_modules=["0"], init_weights=False, **config
    )
    torch.manual_seed(0)
    module = peft.inject_adapter_in_model(made, nn.Sequential(layer))[0]
    state = {
        name.removesuffix(".default"): tensor.detach().clone()
        for name, tensor in module.named_parameters()
        if "base_layer" not in name
    }
    return {**state, "alpha": torch.tensor(2.0)}, module.get_delta_weight("default").detach()


@pytest.mark.parametrize(
    "layer", [nn.Linear(24, 16), nn.Linear(6, 5), nn.Conv2d(8, 12, 3), nn.Conv2d(16, 24, 1)], ids=str
)
@pytest.mark.parametrize("tucker", [False, True])
@pytest.mark.parametrize(
    ("kind", "config"), [("LoHa", {}), ("LoKr", {"decompose_both": False}), ("LoKr", {"decompose_both": True})]
)
def test_a_product_is_what_peft_adds(kind: str, config: dict[str, bool], tucker: bool, layer: nn.Module) -> None:
    state, delta = by_peft(kind, copy.deepcopy(layer), use_effective_conv2d=tucker, **config)
    whole = kind == "LoKr" and not any(name.endswith("_b") for name in state)
    scale = 1 / (2 / 3) if whole else 1.0  # peft scales whole factors, too, and LyCORIS does not
    found = added(state)
    torch.testing.assert_close(found, scale * delta.flatten(1), rtol=1e-4, atol=1e-5)
    assert pair(state)[0].shape[0] <= min(found.shape)


def test_a_scalar_counts_and_an_alpha_may_be_missing() -> None:
    state = {name: normal(seed, *shape) for seed, (name, shape) in enumerate(LOHA.items())}
    plain = added(state)
    torch.testing.assert_close(added({**state, "scalar": torch.tensor(0.5)}), 0.5 * plain)
    torch.testing.assert_close(added({**state, "alpha": torch.tensor(1.0)}), 0.5 * plain)


def test_other_keys_are_left_as_they_are() -> None:
    other = {"lora_unet_y.lora_down.weight": normal(0, 2, 3), "lora_unet_y.alpha": torch.tensor(1.0), "z": normal(1, 2)}
    loha = {f"{NAME}.{name}": normal(2, *shape) for name, shape in LOHA.items()}
    assert as_pairs(other, ROOM) == other
    made = as_pairs({**other, **loha}, ROOM)
    assert all(made[key] is tensor for key, tensor in other.items()) and len(made) == len(other) + 3


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"hada_w1_a": (6, 2)}, "LoHa 'lora_unet_x' lacks hada_w1_b"),
        ({**LOHA, "hada_w2_b": (3, 7)}, "do not fit each other"),
        ({**LOHA, "hada_w2_a": (5, 2)}, "do not fit each other"),
        ({**LOHA, "hada_w1_a": (6,)}, "do not fit each other"),
        ({"lokr_w1": (2, 2)}, "LoKr 'lora_unet_x' lacks lokr_w2_a"),
        ({"lokr_w1": (2,), "lokr_w2": (2, 2)}, "do not fit each other"),
        ({"lokr_w1": (2, 2), "lokr_w2_a": (2, 3), "lokr_w2_b": (2, 2)}, "do not fit each other"),
        ({"lora_mid.weight": (2, 2, 3, 3)}, "LoCon 'lora_unet_x' lacks lora_up.weight"),
        (
            {"lora_mid.weight": (2, 3, 3, 3), "lora_up.weight": (5, 2, 1, 1), "lora_down.weight": (2, 4, 1, 1)},
            "do not fit each other",
        ),
    ],
)
def test_factors_that_do_not_fit_are_refused_by_name(shapes: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pair({name: torch.ones(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    "state",
    [
        {"hada_w1_a": (10**5, 2), "hada_w1_b": (2, 10**5), "hada_w2_a": (10**5, 1), "hada_w2_b": (1, 10**5)},
        {"hada_w1_a": (500, 400), "hada_w1_b": (400, 500), "hada_w2_a": (500, 400), "hada_w2_b": (400, 500)},
        {"lokr_w1": (2000, 2000), "lokr_w2": (2000, 2000)},
        {"lokr_w1_a": (2000, 1), "lokr_w1_b": (1, 2000), "lokr_w2": (3000, 3000)},
        {"lokr_w1": (1, 1), "lokr_w2_a": (1, 1), "lokr_w2_b": (1, 3000), "lokr_t2": (1, 1, 3000, 1000)},
        {"lora_mid.weight": (1, 1, 3000, 1000), "lora_up.weight": (1, 1), "lora_down.weight": (1, 5000)},
    ],
)
def test_small_factors_of_large_matrices_take_no_memory(
    state: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a few hundred bytes may stand for any size: it is refused by its shapes."""
    made: list[int] = []
    for name in ("kron", "einsum"):
        real: Any = getattr(torch, name)

        def counted(*given: Any, real: Any = real) -> Tensor:
            found: Tensor = real(*given)
            made.append(found.numel())
            return found

        monkeypatch.setattr(lycoris.torch, name, counted)
    most = 300_000
    with pytest.raises(PairTooLargeError, match="'lora_unet_x' needs more room than LoRAs have"):
        pair({name: torch.ones(1).expand(shape) for name, shape in state.items()}, most)
    assert max(made, default=0) <= most


def test_all_pairs_of_a_file_count_together() -> None:
    state = {f"lora_unet_{n}.{name}": torch.ones(shape) for n in range(10) for name, shape in LOHA.items()}
    room = 10 * 4 * (6 + 7)
    assert len(as_pairs(state, room)) == 30
    with pytest.raises(PairTooLargeError, match="'lora_unet_9'"):
        as_pairs(state, room - 1)


@settings(max_examples=60)
@given(st.data())
def test_any_kronecker_product_is_exact(data: st.DataObject) -> None:
    """Whole factors have no scale."""
    sizes = [data.draw(st.integers(1, 6)) for _ in range(4)]
    sides = data.draw(st.sampled_from([(), (3, 3), (1, 1)]))
    rank = data.draw(st.integers(1, 7))
    state: dict[str, Tensor] = {"alpha": torch.tensor(7.0)}
    factors = []
    for n, (out, width) in enumerate(((sizes[0], sizes[1]), (sizes[2], sizes[3])), 1):
        rest = sides if n == 2 else ()
        if data.draw(st.booleans()):
            state[f"lokr_w{n}"] = normal(n, out, width, *rest)
            factors.append(state[f"lokr_w{n}"].flatten(1))
        else:
            state[f"lokr_w{n}_a"] = a = normal(n, out, rank)
            state[f"lokr_w{n}_b"] = b = normal(n + 5, rank, width * math.prod(rest))
            factors.append(a @ b)
    scale = 1.0 if {"lokr_w1", "lokr_w2"} <= state.keys() else 7 / rank
    torch.testing.assert_close(added(state), scale * torch.kron(*factors), rtol=1e-4, atol=1e-4)
