"""LoadGen itself drives the real engine: its own verdict, its own logs, and the pictures in its accuracy log."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.batching.pending import rejected
from evaluation import loadgen, pixels
from evaluation.loadgen import LoadGenError
from evaluation.loadgen_tasks import LoggedAnswer
from evaluation.run import EvaluationRun
from pipeline.checkpoints import tiny
from tests.cli.shell import Said, Shell
from tests.evaluation.conftest import CLIP, read_json, table

pytest.importorskip("mlperf_loadgen", reason="LoadGen has wheels for Linux and Python up to 3.13 alone")

CAPTIONS = ("a fox", "a hen", "a pig", "an owl", "a cow")
LATENT = f"--latent off --model {tiny.TINY}"
SHORT = "--duration 0.1 --queries 70"


def driven(shell: Shell, *words: str) -> Said:
    """What LoadGen's command says, of a scenario and these further words."""
    given = ["--prompts", str(table(shell.folder, CAPTIONS)), "--threads", "1", "--out", "log"]
    return shell("mlperf", *given, "--scenario", *" ".join(words).split())


def summary(shell: Shell) -> str:
    return (shell.folder / "log" / "mlperf_log_summary.txt").read_text("utf-8")


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    ("scenario", "rate"), [("Offline", "--target-qps 1000"), ("SingleStream", "")]
)  # Server is VALID from some 460 queries on: too long for a test
def test_loadgen_says_valid_and_we_say_shortened(scenario: str, rate: str, shell: Shell) -> None:
    said = driven(shell, scenario, LATENT, SHORT, rate)
    assert said.code == 0, said
    assert f"{scenario}: VALID (shortened)" in said.out and "Result is : VALID" in said.out
    assert "min_duration_ms is 100, official: 600000" in said.out
    found = read_json(shell.folder / "log" / "mlperf.json")
    assert found["valid"] is True and any("performance_sample_count" in reason for reason in found["shortened"])
    assert f"Scenario : {scenario}" in summary(shell)
    refused = driven(shell, scenario, LATENT, SHORT, rate)
    assert refused.code == 2 and "log is not empty" in refused.err


def test_server_meets_loadgens_own_limit_for_the_model(shell: Shell) -> None:
    said, text = driven(shell, "Server", LATENT, SHORT, "--target-qps 10 --queries 10"), summary(shell)
    assert "target_latency (ns): 20000000000" in text  # 20 s: from LoadGen's own configuration, not from ours
    assert "Performance constraints satisfied : Yes" in text
    assert said.code == 1 and "Server: INVALID (shortened)" in said.out and "Early Stopping" in said.out
    assert "warning: Server issues 10 queries, and LoadGen calls fewer than 459 INVALID: --queries 459" in said.err


class Quick:
    """A panel whose answers are there at once, but for those that are late."""

    model, samples = "stable-diffusion-xl", 5000

    def __init__(self, late: int = 0, late_s: float = 0.0) -> None:
        self._late, self._late_s = late, late_s

    def __len__(self) -> int:
        return 10

    def submit(self, index: int, begun: Callable[[], None]) -> Future[Any]:
        future: Future[Any] = Future()
        if self._late > 0:
            self._late -= 1
            threading.Timer(self._late_s, future.set_result, [None]).start()
        else:
            future.set_result(None)
        return future

    def answer(self, result: Any) -> LoggedAnswer:
        return LoggedAnswer(np.zeros(1, np.uint8), None)


@pytest.mark.parametrize(
    ("scenario", "late", "percentile"), [("Server", 0, 0.99), ("Server", 1, 0.99), ("SingleStream", 1, 0.9)]
)
@pytest.mark.parametrize("missing", [0, 1])
def test_the_fewest_queries_are_those_that_loadgen_wants(
    scenario: str, late: int, percentile: float, missing: int, tmp_path: Path
) -> None:
    """LoadGen itself: VALID with so many, INVALID with one fewer. Which are late is by its own bound."""
    count = loadgen.fewest_queries(percentile, late) - missing
    assert count + missing == {("Server", 0): 459, ("Server", 1): 662, ("SingleStream", 1): 64}[scenario, late]
    conf = tmp_path / "mine.conf"
    late_here = late if scenario == "Server" else 0
    # Instead of the model's 20 s, which would be waited.
    bound = "*.Server.target_latency = 2000\n" if late_here else ""
    conf.write_text(f"{bound}*.*.max_query_count = {count}\n")
    panel = Quick(late_here, late_s=3.0)
    test = loadgen.LoadGenSettings(scenario, target_qps=5000.0, duration_s=0.0, queries=count, user_conf=conf)
    warned: list[str] = []
    result = loadgen.run(test, panel, tmp_path, warned.append)  # type: ignore[arg-type]
    assert result.valid is (missing == 0), result.message
    assert bool(warned) is (missing == 1 and not (scenario == "Server" and late)), (
        "that one is late is not known before"
    )


def test_the_help_shows_runs_that_can_be_valid(shell: Shell) -> None:
    said = shell("mlperf", "--help")
    examples = said.out.partition("examples:")[2].replace("\\\n", " ").splitlines()
    (server,) = (line.split() for line in examples if "--scenario Server" in line)
    queries, rate, duration = (float(server[server.index(f"--{w}") + 1]) for w in ("queries", "target-qps", "duration"))
    assert max(queries, rate * duration) >= loadgen.fewest_queries(0.99, 0)


@pytest.mark.long
def test_accuracy_mode_gives_the_scores_of_evaluate(shell: Shell) -> None:
    scored = f"{LATENT} --lens {CLIP} --resamples 10"
    said = driven(shell, "Offline", "--mode accuracy", scored)
    assert said.code == 0, said
    alone = f"evaluate --protocol mlperf --prompts captions.tsv --threads 1 --out alone {scored}"
    assert shell(*alone.split()).code == 0
    runs = [EvaluationRun.read(shell.folder / name) for name in ("log/run", "alone")]
    for a, b in zip(*(run.files() for run in runs), strict=True):
        # the engine chose its batches anew: on torch that may move a level
        assert np.abs(pixels.read(a).astype(int) - pixels.read(b).astype(int)).max() <= 1
    one, other = (read_json(run.folder / "scores.json")["scores"] for run in runs)
    assert one["emoji-clip-score"]["value"] == pytest.approx(other["emoji-clip-score"]["value"], abs=0.01)
    log = read_json(shell.folder / "log" / "mlperf_log_accuracy.json")
    assert sorted(entry["qsl_idx"] for entry in log) == [0, 1, 2, 3, 4]


def test_settings_of_ones_own_go_into_loadgens(shell: Shell) -> None:
    (shell.folder / "mine.conf").write_text("*.SingleStream.min_duration = 100\n*.*.max_query_count = 3\n")
    said = driven(shell, "SingleStream", LATENT, "--queries 3 --user-conf mine.conf")
    text = summary(shell)
    assert re.search(r"max_query_count : 3\b", text) and re.search(r"min_duration \(ms\): 100\b", text), said
    assert "*.SingleStream.min_query_count = 3" in (shell.folder / "log" / "user.conf").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("Offline --target-qps 0", 2, "--target-qps: must be greater than 0"),
        ("Offline --latent gone.npy", 2, "--latent: gone.npy: cannot be read"),
        ("Offline", 2, "latents.npy: cannot be read"),
        ("Offline --latent off --user-conf gone", 1, "gone: cannot be read"),
        ("Offline --latent off --against gone --mode accuracy", 2, "gone: is nei"),
    ],
)
def test_what_cannot_be_used_is_named(words: str, code: int, said: str, shell: Shell) -> None:
    answer = driven(shell, words, f"--model {tiny.TINY} --lens {CLIP}")
    assert answer.code == code and said in answer.err, answer


def test_an_accuracy_log_that_is_damaged_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "mlperf_log_accuracy.json"
    good = json.dumps({"seq_id": 0, "qsl_idx": 4, "data": bytes(range(12)).hex()})
    path.write_text(f"[\n{good},\n{good.replace('0b', '')}\n]\n")
    found = loadgen.read_accuracy(path, (2, 2))
    index, picture = next(found)
    assert index == 4 and picture.tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    with pytest.raises(LoadGenError, match="line 3 is no picture of 2x2"):
        next(found)
    with pytest.raises(LoadGenError, match="left no summary"):
        loadgen.read_summary(tmp_path / "gone.txt")


class Failing(Quick):
    """A panel whose second sample fails, and whose third is refused at once."""

    def submit(self, index: int, begun: Callable[[], None]) -> Future[Any]:
        if index == 2:
            raise ValueError("refused")
        return rejected(FloatingPointError("NaN")) if index == 1 else super().submit(index, begun)


def test_failures_end_the_test_and_are_told(tmp_path: Path) -> None:
    with pytest.raises(LoadGenError, match=r"2 samples failed; the first: (refused|NaN)"):
        loadgen.run(loadgen.LoadGenSettings("Offline", loadgen.ACCURACY), Failing(), tmp_path)


@pytest.mark.quick("Offline")
@pytest.mark.parametrize("scenario", ["Offline", "SingleStream"])
def test_the_text_panel_is_timed_by_token(scenario: str, shell: Shell) -> None:
    said = driven(shell, scenario, SHORT, "--panel text --target-qps 2000 --max-tokens 8")
    assert said.code == 0 and f"{scenario}: VALID (shortened)" in said.out, said
    text = summary(shell)
    told = "Tokens per second" if scenario == "Offline" else "90.0th first token percentile latency"
    assert told in text and ("Time per Output Token" in text) == (scenario != "Offline")


@pytest.mark.long
def test_the_text_panels_log_holds_the_tokens_that_the_model_writes(shell: Shell) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = driven(shell, "Offline", "--panel text --mode accuracy --max-tokens 8")
    assert said.code == 0, said
    folder = CLIP.parent / "emoji-lm"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    entries = read_json(shell.folder / "log" / "mlperf_log_accuracy.json")
    assert sorted(entry["qsl_idx"] for entry in entries) == list(range(len(CAPTIONS)))
    for entry in entries:
        messages = [{"role": "user", "content": CAPTIONS[entry["qsl_idx"]]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
        logged = np.frombuffer(bytes.fromhex(entry["data"]), np.int32).tolist()
        assert logged and logged == written[: len(logged)] and entry["token_count"] == len(logged)
