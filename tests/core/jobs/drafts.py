"""Drafts of jobs that ask for nothing in particular."""

from __future__ import annotations

from typing import Any

from core.jobs.broker import Envelope
from core.jobs.record import JobDraft, new_id
from core.jobs.store import JobStore

# A queued job as Redis has it.
RECORD = {
    "modality": "image", "model": "m", "state": "queued", "parameters": "{}", "priority": "5", "created": "1",
    "attempt": "0", "lost": "0", "work_ms": "0",
}  # fmt: skip


def draft(**given: Any) -> JobDraft[Any]:
    """A draft of an image job with these fields."""
    return JobDraft(**({"id": new_id(), "modality": "image", "model": "emoji-xl", "request": {"n": 1}} | given))


def make(store: JobStore, **given: Any) -> str:
    """Create a job of such a draft; returns its id."""
    return store.create(draft(**given)).id


def envelope(id: str, priority: int) -> Envelope:
    """The message of a job of such a draft."""
    return Envelope(id, "image", priority, model="emoji-xl")
