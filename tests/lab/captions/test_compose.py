"""Rows are settled alike in whatever order answers come, however many are asked for at once, wherever it stopped.

The author here is a table of answers by seed, so that orders and widths can be tried by the hundred; test_command.py
has the real one.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from contract.errors import Invalid
from core.batching.pending import rejected
from evaluation.service import SourceError
from lab.captions import caption_filter
from lab.captions.caption_client import CaptionClient, CaptionRequest, seed_of, theme_of
from lab.captions.caption_file import CaptionFile
from lab.captions.caption_filter import CaptionFilter
from lab.captions.compose import CaptionGenerator, HopelessError
from lab.captions.text_sources import TextResponse
from lab.training import phrases
from pipeline.checkpoints import tiny

TOKENIZERS = caption_filter.tokenizers(tiny.TINY)
ATTEMPTS = 6


class Stop(Exception):
    """Where a test stops the composing."""


class Table:
    """Answers by seed, some of which are none; they come late and in any order. Gives up after `most`."""

    name, chat, about = "table", True, {"model": "table"}
    expansion_instruction = phrases.SYSTEM

    def __init__(self, width: int, words: int, most: int | None = None) -> None:
        self.width, self.words, self.left = width, words, most
        self.under_way, self.widest = 0, 0
        self._threads = ThreadPoolExecutor(width)

    def submit(self, question: CaptionRequest) -> Future[Any]:
        self.under_way += 1
        self.widest = max(self.widest, self.under_way)
        return self._threads.submit(self._say, question)

    def answer(self, result: Any) -> TextResponse:
        self.under_way -= 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Stop
        assert isinstance(result, TextResponse)
        return result

    def _say(self, question: CaptionRequest) -> TextResponse:
        time.sleep(random.Random(question.seed - question.idea).random() * 1e-3)  # any order must do
        draw = random.Random(question.seed + question.idea)
        word = f"word {draw.randrange(self.words)}"
        text = draw.choice([word, word.upper(), f" {word} ", word, "", "x" * 80, "\ufffd"])
        return TextResponse(text, draw.random() < 0.9)

    def close(self) -> None:
        self._threads.shutdown()


@contextmanager
def composing(out: Path, count: int, table: Table) -> Iterator[tuple[CaptionFile, CaptionGenerator, Progress]]:
    asker = CaptionClient(table.expansion_instruction, chat=True, seed=3)
    with CaptionFile(out, {}, count) as file, Progress(console=Console(quiet=True)) as progress:
        try:
            file.begin(table.about)
            yield file, CaptionGenerator(file, asker, table, CaptionFilter(TOKENIZERS), ATTEMPTS), progress
        finally:
            table.close()


def whole(out: Path, count: int, table: Table) -> bytes:
    with composing(out, count, table) as (file, composer, progress):
        composer.run(progress)
        file.finish()
    return out.read_bytes()


@settings(max_examples=8)
@given(
    count=st.integers(1, 40), width=st.integers(2, 16), words=st.integers(3, 60),
    stops=st.lists(st.integers(0, 60), max_size=3),
)  # fmt: skip
def test_width_order_and_stops_change_nothing(
    count: int, width: int, words: int, stops: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("composed")
    try:
        one = whole(folder / "one.tsv", count, Table(1, words))
    except HopelessError:
        with pytest.raises(HopelessError):
            whole(folder / "two.tsv", count, Table(width, words))
        return
    for stop in stops:
        with composing(folder / "two.tsv", count, Table(width, words, stop)) as (file, composer, progress):
            if file.finished:
                break
            try:
                composer.run(progress)
            except Stop:
                continue
            file.finish()
            break
    out = folder / "two.tsv"
    table = Table(width, words)
    if not out.exists():
        assert whole(out, count, table) == one
    assert out.read_bytes() == one and table.widest <= width
    assert (folder / "two.tsv.json").read_text() == (folder / "one.tsv.json").read_text()
    texts = [line.split("\t")[1] for line in one.decode().splitlines()[1:]]
    assert Counter("".join(text.split()).casefold() for text in texts).most_common(1)[0][1] == 1
    with CaptionFile(out, {}, count) as file:
        assert len(file.rows) == count and file.made == len(texts)
        for row in file.rows:  # every attempt is counted, and none is made beyond the bound
            assert sum(row.again.values()) <= ATTEMPTS - (row.caption is not None)
            assert row.caption is not None or sum(row.again.values()) == ATTEMPTS
            last = sum(row.again.values()) - (row.caption is None)
            assert row.seed == seed_of(3, row.index, last)


def test_what_never_brings_a_caption_is_given_up(tmp_path: Path) -> None:
    class Silent(Table):
        def _say(self, question: CaptionRequest) -> TextResponse:
            return TextResponse("", True)

    with (
        composing(tmp_path / "c.tsv", 1000, Silent(4, 1)) as (file, composer, progress),
        pytest.raises(HopelessError) as hopeless,
    ):
        composer.run(progress)
    assert hopeless.value.again == {"empty": 16 * ATTEMPTS} and len(file.rows) == 16


@pytest.mark.parametrize(
    "refusal",
    [Invalid("messages.0.content", "is too long"), SourceError("400", "prompt"), Invalid("max_tokens", "is too many")],
)
def test_a_refused_question_costs_an_attempt_and_one_that_can_never_be_served_ends_it(
    tmp_path: Path, refusal: Exception
) -> None:
    class Strict(Table):
        def submit(self, question: CaptionRequest) -> Future[Any]:
            return rejected(refusal) if question.seed % 3 == 0 else super().submit(question)

    with composing(tmp_path / "c.tsv", 12, Strict(4, 60)) as (file, composer, progress):
        if "max_tokens" in str(refusal):
            with pytest.raises(Invalid, match="max_tokens"):
                composer.run(progress)
            return
        composer.run(progress)
        assert len(file.rows) == 12 and file.made > 6 and file.again["refused"] > 0


def test_seeds_and_themes_are_spread() -> None:
    seeds = {seed_of(seed, row, attempt) for seed in range(5) for row in range(50) for attempt in range(20)}
    assert len(seeds) == 5000 and all(0 <= seed < 2**63 for seed in seeds)
    assert len({theme_of(seed) for seed in seeds}) == 288
