"""PEFT's configurations are read as PEFT reads them, and strangers' expressions within bounds of size and time."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from core import peft_config
from core.peft_config import LayerPatterns, Targets, check_fields

LAYERS = st.sampled_from([
    "q_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.11.mlp.down_proj",
    "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k", "mid_block.attentions.0.proj_in", "layersx1.q_proj",
    "text_model.encoder.layers.1.mlp.fc1", "a.b.c", "a.xbyc",
])  # fmt: skip
WORDS = st.sampled_from([
    "q_proj", "to_k", "layers", ".", r"\.", "1", "0", ".*", "[0-9]+", "(q_proj|k_proj)", "^", "$", "model", "self_attn",
    "a", "b", "c", "x", "?", "+", "|", "(?:", ")", "(", r"\d", "{1,2}", "(?i)", r"\b", "[01]", "-", "attn2", "_", "(?!",
])  # fmt: skip
KEYS = st.lists(WORDS, max_size=6).map("".join) | LAYERS | LAYERS.map(lambda name: name.rpartition(".")[2])


@given(st.dictionaries(KEYS, st.integers(), max_size=5), LAYERS)
@settings(max_examples=300)
def test_the_value_of_a_layer_is_pefts(patterns: dict[str, int], layer: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = patterns.get(get_pattern_key([*patterns], layer), "usual")
        except Exception as error:  # one behind it fits first, or PEFT cannot read it either
            expected = error
    try:
        actual: Any = LayerPatterns("alpha_pattern", patterns).value(layer, "usual")
    except ValueError as error:
        assert str(error).startswith("alpha_pattern")
        assert "no regular expression" in str(error) and not all(map(compiles, patterns))
    else:
        assert actual == expected


def compiles(key: str, form: str = "") -> bool:
    import re

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            re.compile(form or rf"(.*\.)?({key})$")
        except re.error:
            return False
    return True


@pytest.mark.parametrize(
    ("pattern", "layer", "fits"),
    [
        (r".*\.layers\.1\..*(q_proj|k_proj)", "model.layers.1.self_attn.q_proj", True),
        (r".*\.layers\.1\..*(q_proj|k_proj)", "model.layers.0.self_attn.q_proj", False),
        ("^q_proj", "model.layers.0.self_attn.q_proj", False), ("^q_proj$", "q_proj", True),
        ("proj", "model.layers.0.self_attn.q_proj", False), ("o_proj", "model.layers.0.mlp.moo_proj", False),
        ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", True), ("layers.1.q_proj", "layersx1.q_proj", True),
        ("q_proj.lora_A", "q_proj", False), ("", "q_proj", False), (r"(?!.*k_proj).*", "a.k_proj", False),
        (r"(?!.*k_proj).*", "a.q_proj", True),
    ],
)  # fmt: skip
def test_ends_and_expressions(pattern: str, layer: str, fits: bool) -> None:
    assert (get_pattern_key([pattern], layer) == pattern) is fits, "PEFT reads it otherwise"
    assert (LayerPatterns("r", {pattern: 1}).value(layer, None) == 1) is fits


def test_the_first_that_fits_counts() -> None:
    for keys in (["q_proj", ".*q_proj"], [".*q_proj", "q_proj"], ["self_attn.q_proj", "q_proj", ".*"]):
        patterns = {key: number for number, key in enumerate(keys)}
        assert LayerPatterns("r", patterns).value("layers.0.self_attn.q_proj", None) == 0


@pytest.mark.parametrize(
    "patterns", [[1], "q_proj", 3, {"(": 1}, {"a" * 2000 + "+": 1}, {f"a{n}+": n for n in range(600)}]
)
def test_what_is_no_table_of_expressions_is_refused_by_the_field(patterns: object) -> None:
    with pytest.raises(ValueError, match=r"^rank_pattern"):
        LayerPatterns("rank_pattern", patterns)


@pytest.mark.parametrize("pattern", ["((a|a)+)+b", "(.*)*(.*)*(.*)*(.*)*!", r"(\w|\w)*(\w|\w)*#", "(a|ab|b)*c"])
def test_an_expression_that_backtracks_for_ever_is_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_config, "_BUDGET_S", 0.2)
    layers = [f"{'ab' * 40}.{'a' * 200}.{number}" for number in range(100)]
    patterns = LayerPatterns("alpha_pattern", {pattern: 1})
    began = time.process_time()
    try:
        for layer in layers:
            assert patterns.value(layer, 0) == 0
    except ValueError as error:
        assert str(error) == "alpha_pattern: its expressions take more than 0.2 s to match"
    assert time.process_time() - began < 30, "unbounded it takes years"


def test_many_names_cost_no_more_than_they_are() -> None:
    patterns = LayerPatterns("alpha_pattern", {f"blocks.{n}.attn.to_q": n for n in range(20_000)})
    for n in (0, 19_999, 7):
        assert patterns.value(f"unet.blocks.{n}.attn.to_q", None) == n
    assert patterns.value("blocks.20000.attn.to_q", None) is None


NAMES = st.lists(KEYS, min_size=1, max_size=3) | KEYS.filter(lambda key: compiles(key, key) and key != "")


INDICES, PATTERNS = st.none() | st.lists(st.integers(0, 12), max_size=2), st.sampled_from([None, [], ["layers"]])


@given(NAMES, st.none() | NAMES, INDICES, PATTERNS, LAYERS)
def test_the_layers_that_it_is_for_are_pefts(
    targets: Any, excluded: Any, indices: list[int] | None, pattern: list[str] | None, layer: str
) -> None:
    if isinstance(targets, str):
        indices = pattern = None  # PEFT takes no such config
    config = {"target_modules": targets, "exclude_modules": excluded}
    config |= {"layers_to_transform": indices, "layers_pattern": pattern}
    expected = check_target_module_exists(
        SimpleNamespace(**config, modules_to_save=None, target_parameters=None), layer
    )
    try:
        Targets("x", config).check(layer)
    except ValueError as error:
        assert not expected, error
    else:
        assert expected


def test_what_says_more_than_matrices_is_refused_by_its_name() -> None:
    from peft import LoraConfig

    check_fields(LoraConfig(target_modules=["q_proj"]).to_dict(), "adapter_config.json")
    for field, value in (("use_dora", True), ("init_lora_weights", "pissa"), ("arrow_config", {"top_k": 3})):
        with pytest.raises(ValueError, match=f"^x: {field} .* is not supported$"):
            check_fields({field: value}, "x")
    check_fields({"use_dora": True}, "x", ("use_dora",))
