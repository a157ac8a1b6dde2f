"""Drafts are checked by field, ids are ours, and JSON is strict."""

from __future__ import annotations

import re
from collections import UserDict
from typing import Any

import pytest

from core.jobs.record import FIELDS, Job, JobDraft, JobState, from_json, new_id, to_json
from tests.core.jobs.drafts import RECORD


def test_states() -> None:
    assert [state.value for state in JobState if not state.final] == ["queued", "running"]
    assert [state.value for state in JobState if state.final] == ["succeeded", "failed", "cancelled", "expired"]


def test_ids() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("job_[0-9a-f]{24}", id) for id in ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("id", "a" * 65),
        ("id", 'job_"'),
        ("id", "job_1\n"),
        ("modality", "sound"),
        ("priority", -1),
        ("priority", 10),
        ("deadline_s", -0.1),
        ("deadline_s", float("nan")),
        ("deadline_s", float("inf")),
        ("deadline_s", 1e10),
        ("work_ms", -1),
        ("work_ms", 10**13),
    ],
)
def test_drafts_that_are_refused(field: str, value: Any) -> None:
    given: dict[str, Any] = {"id": "job_1", "modality": "image", "model": "emoji-xl", "request": {}}
    JobDraft(**given)
    with pytest.raises(ValueError, match=f"^{field}: ") as raised:
        JobDraft(**(given | {field: value}))
    assert repr(value) not in str(raised.value)


@pytest.mark.parametrize("value", [{}, {"a": [1, None, "ü\ud800"]}, [2**63], "", 0.1])
def test_json_there_and_back(value: Any) -> None:
    assert from_json(to_json(value)) == value
    assert to_json(value).isascii()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}])
def test_json_has_no_nan(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(value)


def test_no_json() -> None:
    assert from_json(None) is None


def test_a_summary_has_every_field_that_a_job_is_read_from() -> None:
    """A field that `Job.of` reads and `FIELDS` lacks would be missing in lists alone."""
    read: set[str] = set()

    class Fields(UserDict[str, str]):
        def __getitem__(self, name: str) -> str:
            read.add(name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

    Job.of("job_1", Fields(RECORD))
    assert read == {*FIELDS}
