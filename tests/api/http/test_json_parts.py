"""Large documents are encoded as the standard library encodes them, while other threads go on."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http import json_parts
from api.http.json_parts import Deferred, LargeJSONResponse, dumps
from api.text import embeddings
from contract.text import TextJob
from core.jobs import record
from core.jobs.record import Job, JobState, from_json

ENTRIES = [{"token": f" {k}", "logprob": -k / 7, "bytes": [1, 2], "top": [{"token": "a"}] * 20} for k in range(500)]
ANSWER = {"choices": [{"index": k, "logprobs": {"content": ENTRIES}} for k in range(16)], "usage": {"tokens": 1}}
TEXT = json.dumps(ANSWER)


def job_of_embeddings(count: int, width: int) -> tuple[Job, dict[str, Any]]:
    """A job that succeeded, and its result, as a worker writes it."""
    draw = random.Random(0)
    vector = base64.b64encode(struct.pack(f"<{width}f", *(draw.gauss(0, 1) for _ in range(width)))).decode()
    parameters = TextJob(prompts=["a"], embedding="float").to_dict()
    job = Job(
        "job_1", "text", "m", JobState.SUCCEEDED, parameters, 5, 0.0, None, None, None, 1, 0, "", None, None, None,
        False, 0,
    )  # fmt: skip
    return job, {"embeddings": [vector] * count, "prompt_tokens": [1] * count}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=60,
)


@given(VALUES, st.booleans())
def test_it_is_the_same_text(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only)
    assert dumps(value, ascii_only=ascii_only) == text
    assert dumps([Deferred(lambda: value)] * 2, ascii_only=ascii_only) == f"[{text},{text}]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"a": float("nan")}] * 40])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        dumps(value)
    with pytest.raises(TypeError, match="object has no form in JSON"):
        dumps([object()])


def called_back(frame: FrameType | None) -> bool:
    """Return whether a thread is in code of ours that the encoder or the parser has called."""
    ours = frame is not None and frame.f_code.co_filename in {json_parts.__file__, record.__file__, embeddings.__file__}
    while ours and frame is not None:
        if frame.f_code.co_filename in {json.encoder.__file__, json.decoder.__file__}:
            return True
        frame = frame.f_back
    return False


@contextmanager
def turns() -> Iterator[Callable[[], int]]:
    """Count the turns that another thread gets, of the interpreter's lock, in the midst of this one's JSON."""
    interval, over, counts, main = sys.getswitchinterval(), threading.Event(), [0], threading.get_ident()

    def run() -> None:
        while not over.is_set():
            counts[0] += called_back(sys._current_frames().get(main))
            over.wait(1e-5)

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield lambda: counts[0]
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


def write_embeddings() -> None:
    job, result = job_of_embeddings(512, 256)
    LargeJSONResponse(embeddings.answer(job, result))


WORK: dict[str, Callable[[], object]] = {
    "embeddings": write_embeddings, "log probabilities": lambda: dumps(ANSWER), "a result": lambda: from_json(TEXT)
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_other_threads_go_on_meanwhile(name: str) -> None:
    """The standard library's encoder and parser alone let none of them have a turn."""
    with turns() as count:
        WORK[name]()
        assert count() >= 10


def test_it_is_handed_over_in_slices() -> None:
    response, messages = LargeJSONResponse({"text": "x" * 10**6}), []

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(response({"type": "http"}, None, send))  # type: ignore[arg-type]
    bodies = [message["body"] for message in messages[1:]]
    assert b"".join(bodies) == response.body and max(map(len, bodies)) <= 256 * 1024
    assert [message["more_body"] for message in messages[1:]] == [True] * (len(bodies) - 1) + [False]
    assert dict(messages[0]["headers"])[b"content-length"] == str(len(response.body)).encode()
