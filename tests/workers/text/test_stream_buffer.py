"""Pieces of texts: put together they are the texts, however many are lost, and they take a small multiple of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from core.jobs.record import JobDraft, ProgressReport, to_json
from tests.workers.crew import Crew
from workers.text.stream_buffer import StreamBuffer, StreamChunk


def put_together(texts: list[str], logprobs: list[list[Any]], news: StreamChunk) -> None:
    """As a reader does: a piece may say again what it knows, and never leaves a gap."""
    for piece in news.pieces:
        index, at = piece["index"], piece["at"]
        assert at <= len(texts[index])
        texts[index] = texts[index][:at] + piece["text"]
        if "logprobs" in piece:
            assert piece["token"] <= len(logprobs[index])
            logprobs[index][piece["token"] :] = piece["logprobs"]


@pytest.mark.parametrize("seed", range(3))
def test_pieces_make_up_the_texts(seed: int) -> None:
    dice = random.Random(seed)
    written = StreamBuffer(3)
    wanted, texts = [""] * 3, [""] * 3
    chances: list[list[Any]] = [[], [], []]
    logprobs: list[list[Any]] = [[], [], []]
    for _ in range(400):
        for _ in range(dice.randrange(3)):
            index, text = dice.randrange(3), dice.choice(["", "a", "bc", "ø" * 30])
            told = [{"token": text, "logprob": -0.5, "top": []}] * dice.randrange(2)
            written.add(index, text, told)
            wanted[index] += text
            chances[index] += told
        news = written.news()
        put_together(texts, logprobs, news)
        assert texts == wanted and logprobs == chances
        if dice.random() < 0.7:  # else it got lost on its way to Redis, or nobody knows whether it did
            written.told(news)
    assert not written.news().pieces or not written.news().complete


def test_what_lies_in_a_stream_is_twice_the_texts_at_most() -> None:
    """However long they grow: the last whole texts, and events of pieces that are no larger together."""
    written, whole, pieces, event = StreamBuffer(1), 0, 0, 100
    for _ in range(30_000):
        written.add(0, "word ", [])
        news = written.news()
        size = len(to_json(news.pieces)) + event
        whole, pieces = (size, 0) if news.complete else (whole, pieces + size)
        written.told(news)
        assert whole + pieces <= 2 * len(written.texts[0]) + 16_384 + 2 * 200
    assert whole > 2 * 16_384


def test_what_is_told_is_a_small_multiple(crew: Crew) -> None:
    """In the stream as it lies in Redis, whose pieces make way for the whole now and then."""
    id = "long"
    crew.store.create(JobDraft(id, "text", "m", {}, followed=True))
    claim = crew.store.leases.claim(id, "me")
    assert claim is not None and claim.followed
    written = StreamBuffer(2)
    for k in range(6000):
        written.add(k % 2, f"{k} ", [])
        news = written.news()

        report = ProgressReport(id, claim.fence, {"steps_done": k}, pieces=news.pieces, complete=news.complete)
        assert crew.store.leases.report([report]).followed == {id}
        written.told(news)
    size = sum(map(len, written.texts))
    kept = crew.redis.memory_usage(f"diptych:events:{id}", samples=0)

    assert kept < 3 * size + 65_536
    texts: list[str] = ["", ""]
    for type, data in crew.events(id):
        if type == "progress":
            put_together(texts, [[], []], StreamChunk(data.get("pieces", []), False, []))
    assert texts == written.texts
    assert [type for type, _ in crew.events(id)][:2] == ["queued", "running"]


def test_who_comes_later_has_all_told_from_the_start(crew: Crew) -> None:
    crew.store.create(JobDraft("late", "text", "m", {}, followed=False))
    claim = crew.store.leases.claim("late", "me")
    assert claim is not None and claim.followed is False
    report = ProgressReport("late", claim.fence, {"steps_done": 1})
    assert crew.store.leases.report([report]).followed == set()
    assert [type for type, _ in crew.events("late")] == ["queued", "running"], "nobody follows"
    assert crew.job("late").progress == {"steps_done": 1}
    assert crew.store.follow("late")
    assert crew.store.leases.report([report]).followed == {"late"}
    assert [type for type, _ in crew.events("late")] == ["queued", "running", "progress"]
    crew.store.cancel("late")
    assert not crew.store.follow("late")
