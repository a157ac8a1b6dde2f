"""Text over several ranks is that of one process: alone, in flight, after preemption, embedded and scored; and what
does not divide, or ends, is refused or reported by name.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from contract.parallel import parse
from core.failures import DeviceLost
from core.kernels.kv_cache import TokenBatch
from llm.checkpoints.load import TextModelError, load
from llm.families import tiny
from llm.parallel.followers import Followers
from llm.parallel.shards import Rank
from llm.parameters import GeneratedText, TextParameters
from tests.llm import ranks
from tests.llm.stage import answers, greedy, serving

PROMPTS = [tuple(3 + (7 * n + i) % 250 for i in range(n)) for n in (5, 40, 9, 17, 2, 33, 12, 21)]
WANTED = [
    *(greedy(prompt, 12, ignore_end=True) for prompt in PROMPTS),
    TextParameters(PROMPTS[1], 8, temperature=0.8, seed=7, ignore_end=True),
    greedy(PROMPTS[3], 4, logprobs=3, prompt_logprobs=True, ignore_end=True),
    TextParameters(PROMPTS[0], 0, embed=True),
]
# Fewer pages than all of them need at once: some wait, and some are preempted.
OPTIONS: dict[str, Any] = {"max_requests": 6, "pages": 14, "context": 128, "max_rows": 48, "chunk": 32}


@pytest.fixture(scope="module")
def expected() -> list[GeneratedText]:
    with serving(load(tiny.TINY), **OPTIONS) as (engine, _):
        return answers(engine, WANTED)


def compare(actual: Sequence[GeneratedText], expected: Sequence[GeneratedText]) -> None:
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.tokens == b.tokens, i
        for ours, theirs in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
    x, y = (torch.frombuffer(bytearray(texts[-1].pooled), dtype=torch.float32) for texts in (actual, expected))
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.quick("tp2pp2")
@pytest.mark.parametrize("parallel", ["tp2", "tp4", "pp2", "tp2pp2"])  # tp4: more ranks than heads of keys
def test_text_of_ranks_is_that_of_one_process(parallel: str, expected: list[GeneratedText]) -> None:
    with ranks.serving(tiny.TINY, parallel, **OPTIONS) as (engine, runner):
        compare(answers(engine, WANTED), expected)
        assert runner.execution.kernels == "torch" and runner.execution.cache.kv_heads == (
            2 if parallel == "pp2" else 1
        )
    if parallel == "pp2":
        return
    # The same bits in any batch: sums are in the order of ranks.
    with ranks.serving(tiny.TINY, parallel, **OPTIONS) as (engine, _):
        assert [text.tokens for text in answers(engine, WANTED[::-1])] == [text.tokens for text in expected[::-1]]


def test_answers_ahead_of_the_host_are_the_same(
    expected: list[GeneratedText], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Rank 0 shares the tokens that it draws. Where a step or these are told to some ranks only, they cannot go on."""
    with ranks.serving(tiny.TINY, "tp2", **OPTIONS, ahead=True) as (engine, runner):
        compare(answers(engine, WANTED), expected)

        def fails(*_: object) -> None:
            raise MemoryError("no message")

        step, execution = TokenBatch.of([1], [0], [0], [0]), runner.execution
        with monkeypatch.context() as patched:
            patched.setattr(Followers, "tell", fails)
            for lost in (lambda: execution.forward(step), lambda: execution.keep(step, torch.tensor([1]))):
                with pytest.raises(DeviceLost, match="tp2: a step has failed"):
                    lost()


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ("tp8", "its 4 attention heads are not divided by 8 ranks"),
        ("pp3", "its 2 layers are not divided by 3 stages"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(parallel: str, reason: str) -> None:
    with pytest.raises(TextModelError, match=f"{tiny.TINY}: text_parallel: {reason}"):
        load(tiny.TINY, rank=Rank(0, parse(parallel)))
    with pytest.raises(TextModelError, match="text_parallel: models of type mixtral are not split"):
        load(tiny.MIXTRAL_TINY, rank=Rank(0, parse("tp2")))


def test_a_rank_that_does_not_load_is_reported_by_name() -> None:
    loader = "tests.llm.parallel.test_parallel:out_of_memory"
    followers = Followers(
        parse("pp2"), {}, device=torch.device("cpu"), loader=loader, launch=ranks.ThreadedRank, on_lost=print
    )
    with pytest.raises(TextModelError, match=r"rank 1 of pp2 \(process \d+\): MemoryError: 80 GiB are not enough"):
        followers.loaded("")


def out_of_memory(**_: object) -> None:
    raise MemoryError("80 GiB are not enough")


def test_ranks_with_another_model_are_refused() -> None:
    with pytest.raises(TextModelError, match="rank 1 has read another model than rank 0"):
        ranks.loaded(tiny.TINY, "pp2", digest="another")


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(TextModelError, match=r"text_parallel: tp2 takes 2 GPUs from cuda:98 on, and torch sees \d"):
        Followers(parse("tp2"), {}, device=torch.device("cuda:98"))


def test_a_rank_that_ends_is_reported(tmp_path: Path) -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    model, followers = ranks.loaded(tiny.TINY, "pp2", on_lost=lost.put)
    try:
        group = followers.join({"pages": 4, "sequences": 1, "context": 32, "rows": 32})
        followers.ready()
        followers.tell(b"\x09\x00\x00\x00\x00\x00\x00\x00")  # no message: it ignores it
        followers.tell(b"\x00")  # one that cannot be read
        assert "rank 1 of pp2" in lost.get(timeout=60)
    finally:
        followers.close()
        group.leave().join()
    assert replace(model).layers == 1


PARENT = """
import socket, subprocess, sys, os, time
ours, theirs = socket.socketpair()
follower = [sys.executable, "-P", "-m", "llm.parallel.follower", str(theirs.fileno()), str(os.getpid())]
print(subprocess.Popen(follower, pass_fds=[theirs.fileno()]).pid, flush=True)
theirs.close()
time.sleep(600)
"""


def test_a_rank_ends_with_its_worker_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        rank = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        psutil.wait_procs([rank], timeout=60)
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
