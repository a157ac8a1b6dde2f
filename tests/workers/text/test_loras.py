"""Requests with LoRAs write what PEFT's merged weights do: in one batch with others and without, after preemption."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import Invalid
from core.batching.engine import Aborted
from core.batching.request import Request
from core.kernels.kv_cache import Kind
from llm.checkpoints.load import TextModel, load
from llm.families import tiny
from llm.features.adapters import CONFIG, WEIGHTS
from llm.parameters import TextParameters
from llm.runner import TextRunner
from tests.llm import stage
from tests.llm.test_exact import check
from workers.text.loras import TextLoraFolder

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of peft's
MOST = 12
MIB = 2**20
OPTIONS: dict[str, dict[str, Any]] = {
    "poet": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "critic": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    "clerk": {
        "r": 8, "lora_alpha": 32, "target_modules": ["k_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"layers.1.mlp.down_proj": 3}, "alpha_pattern": {"o_proj": 5},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters of the tiny model, as PEFT saves them; their merged models answer in `merged`."""
    path = tmp_path_factory.mktemp("text-loras")
    for name in OPTIONS:
        adapted(name).save_pretrained(str(path / name))
    return path


@functools.cache
def adapted(name: str, model: str = tiny.TINY) -> Any:
    peft = pytest.importorskip("peft")
    network = copy.deepcopy(load(model).network)
    torch.manual_seed(len(name))
    adapter = peft.get_peft_model(network, peft.LoraConfig(task_type="CAUSAL_LM", **OPTIONS[name]))
    with torch.no_grad():
        for key, parameter in adapter.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.3)
    return adapter.eval()


@functools.cache
def merged(name: str) -> TextModel:
    model = stage.small()
    if not name:
        return model
    return replace(model, network=copy.deepcopy(adapted(name)).merge_and_unload().eval().requires_grad_(False))


@functools.cache
def answers(name: str) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.generated(merged(name), stage.prompts(stage.small(), 8), MOST))


def adapters(runner: TextRunner, folder: Path, capacity: int = 64 * MIB) -> TextLoraFolder:
    runner.adapters = made = TextLoraFolder(folder, runner.execution, capacity)
    return made


def requests(names: list[str], most: int = MOST, **options: Any) -> list[TextParameters]:
    prompts = stage.prompts(stage.small(), 8)
    return [stage.greedy(prompt, most, adapter=name, **options) for prompt in prompts for name in names]


@pytest.mark.parametrize("kernels", [True, False])
def test_answers_of_three_loras_in_one_batch(folder: Path, kernels: bool) -> None:
    names = ["", *OPTIONS]
    assert len({answers(name) for name in names}) == 4
    options: dict[str, Any] = {"kernels": stage.kernels()} if kernels else {}
    with stage.serving(stage.small(), max_requests=32, chunk=16, **options) as (engine, runner):
        held = adapters(runner, folder)
        assert held.asset_names() == sorted(OPTIONS)
        texts = stage.answers(engine, requests(names, logprobs=3))
        for at, name in enumerate(names):
            found, prompts = [text.tokens for text in texts[at :: len(names)]], stage.prompts(stage.small(), 8)
            assert len(check(found, [*answers(name)], prompts, merged(name))) <= 1
        if kernels:  # in any company the same bits
            alone = [stage.answers(engine, [request])[0] for request in requests(names, logprobs=3)[-4:]]
            assert [text.logprobs for text in alone] == [text.logprobs for text in texts[-4:]]
    assert all(not asset.pins for asset in map(held.cache.known, OPTIONS))


def test_answers_after_preemption_and_beams(folder: Path) -> None:
    runner = TextRunner(stage.small(), kernels=stage.kernels(), chunk=9)
    held = adapters(runner, folder)
    for number, request in enumerate(requests(["critic"])[:2]):
        expected = answers("critic")[number]
        assert {stage.preempted(runner, request, n, n + 2).tokens for n in (1, 3, 6)} == {expected}
        beams = replace(request, beams=3)
        assert stage.preempted(runner, beams, 2, 5).tokens == stage.preempted(runner, beams).tokens
    assert not held.cache.known("critic").pins
    runner.close()


KINDS: list[dict[str, Any]] = [
    {}, {"beams": 3}, {"beams": 2, "adapter": "poet"}, {"adapter": "clerk", "logprobs": 2}, {"stop": ("e", "th")},
    {"frequency_penalty": 0.5, "adapter": "critic"}, {"logit_bias": ((5, 3.0),)}, {"json_schema": "{}"}, {"beams": 1},
]  # fmt: skip


def test_requests_of_all_kinds_ahead_of_the_host_while_others_are_aborted(folder: Path) -> None:
    """With pages for a few and room for two adapters: each is what it is alone, and nothing stays held."""
    pytest.importorskip("llguidance")
    prompts, model = stage.prompts(stage.small(), 4), stage.small()
    wanted = [stage.greedy(prompt, most, **kind) for prompt in prompts for kind in KINDS for most in (1, 14)]
    options: dict[str, Any] = {"kernels": stage.kernels(), "max_requests": 8, "chunk": 16, "context": 128}
    with stage.serving(model, **options, pages=64) as (engine, runner):
        adapters(runner, folder)
        alone = [stage.answers(engine, [one])[0] for one in wanted]
    with stage.serving(model, **options, pages=30, ahead=True) as (engine, runner):
        held = adapters(runner, folder, 64_000)
        futures = [engine.submit(Request(f"{i}", "text", one, tenant="ab"[i % 2])) for i, one in enumerate(wanted)]
        for i in range(3, len(wanted), 7):
            futures[i - 3].exception(60)
            engine.abort(f"{i}")
        for future, expected in zip(futures, alone, strict=True):
            assert (
                isinstance(future.exception(60), Aborted)
                or replace(future.result(), cached=expected.cached) == expected
            )
        assert held.cache.reads > 3, "room for two: some were evicted, and read again"
    assert all(not asset.pins for asset in map(held.cache.known, OPTIONS))


def test_pages_are_shared_among_requests_of_one_lora_only(folder: Path) -> None:
    prompt = tuple(range(40))
    with stage.serving(stage.small(), kernels=stage.kernels()) as (engine, runner):
        adapters(runner, folder)
        names = ["", "poet", "poet", "", "critic"]
        cached = [stage.answers(engine, [stage.greedy(prompt, 2, adapter=name)])[0].cached for name in names]
    assert cached == [0, 0, 32, 32, 0]


@pytest.mark.parametrize(("kernels", "kv"), [(True, "float"), (True, "int8"), (False, "float"), (False, "int8")])
def test_a_lora_that_overflows_fails_its_own_requests_alone(tmp_path: Path, kernels: bool, kv: Kind) -> None:
    """Who gets their pages next reads none of what they left there."""
    model = stage.small()
    stage.save_lora(tmp_path / "vast", model, names=("self_attn.v_proj",), spread=1e25)
    given: dict[str, Any] = {"kernels": stage.kernels()} if kernels else {}
    prompts = [tuple(range(5, 30)), tuple(range(30, 100))]
    with stage.serving(model, max_requests=2, pages=6, context=96, kv=kv, chunk=16, **given) as (engine, runner):
        adapters(runner, tmp_path)
        expected = stage.answers(engine, [stage.greedy(prompts[0], MOST)])[0].tokens
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="returned NaN"):
                stage.answers(engine, [stage.greedy(prompts[1], MOST, adapter="vast")])
            assert stage.answers(engine, [stage.greedy(prompts[0], MOST)])[0].tokens == expected


def edited(folder: Path, to: Path, **fields: Any) -> None:
    shutil.copytree(folder / "poet", to / "other")
    path = to / "other" / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"lora_alpha": 1e308}, "lora_alpha is too large"),
        ({"r": 5}, "is of rank 4, which is not what adapter_config.json says"),
        ({"rank_pattern": [3]}, "rank_pattern is no object"),
        ({"rank_pattern": {".*_proj": 3}}, "which is not what adapter_config.json says"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern: '[(]' is no regular expression"),
        ({"target_modules": ["k_proj"]}, "target_modules leaves out"),
        ({"exclude_modules": "model.*"}, "exclude_modules leaves out"),
        ({"layers_to_transform": [7]}, "layers_to_transform leaves out"),
    ],
)
def test_other_adapters_are_refused_by_name(folder: Path, tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    edited(folder, tmp_path, **fields)
    refuses(tmp_path, reason)


def refuses(path: Path, reason: str, name: str = "other") -> None:
    runner = TextRunner(stage.small(), kernels=stage.kernels(), max_requests=2)
    adapters(runner, path, 40_000)
    with closing(runner), pytest.raises(Invalid, match=reason) as refused:
        runner.check(Request("0", "text", stage.greedy((1, 2, 3), 4, adapter=name)))
    assert refused.value.field == "model"


def test_files_that_are_missing_too_large_or_damaged_are_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("../poet", "nobody"):
        refuses(tmp_path, "there is no", name)
    refuses(folder, r"needs \d+ bytes, and there is room for 40000", "critic")
    edited(folder, tmp_path)
    weights = tmp_path / "other" / WEIGHTS
    os.truncate(weights, 1 << 40)  # which is not read
    refuses(tmp_path, r"other: needs \d+ bytes, and there is room for 40000")
    weights.write_bytes(b"no tensors")
    refuses(tmp_path, "damaged")
    weights.unlink()
    refuses(tmp_path, "there is no")


def test_a_folder_that_may_not_be_read_hides_no_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, is_file = TextRunner(stage.small(), kernels=stage.kernels(), max_requests=2), Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "critic":
            raise PermissionError(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert adapters(runner, folder).asset_names() == sorted({*OPTIONS} - {"critic"})
    runner.close()


def test_an_adapter_that_cannot_be_read_again_stays_reserved_for_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Memory may be short once it was evicted: an error that is not of its file."""
    runner = TextRunner(stage.small(), kernels=stage.kernels(), max_requests=2)
    held = adapters(runner, folder)
    held.check("poet")
    held.cache.evict(["poet"])

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(runner.execution, "pack", fails)
    request = Request("0", "text", stage.greedy((1, 2, 3), 4, adapter="poet"))
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.admit(request)
    assert not held.cache.known("poet").pins
    runner.close()
