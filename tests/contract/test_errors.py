"""Why a request is refused reaches a client as data, through the record, also from a worker of an older version."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from api.errors import job_error
from contract.errors import CONTEXT_LENGTH, Invalid
from core.jobs.record import Job
from tests.core.jobs.drafts import RECORD

FAILED = Job.of("a", {**RECORD, "state": "failed"})
TOLD = [
    Invalid("prompt", "has no context of its own: none", CONTEXT_LENGTH),
    Invalid("deepcache.depth", "is none"),
    Invalid(None, "The request: it is none."),
]


@pytest.mark.parametrize("error", TOLD, ids=str)
def test_field_code_and_sentence_reach_the_client(error: Invalid) -> None:
    said = job_error(replace(FAILED, error=error.to_dict()))
    assert (said.status, said.param, said.code, str(said)) == (400, error.field, error.code, str(error))
    assert said.detail == error.message


def test_a_sentence_is_not_taken_apart() -> None:
    """An older worker tells no field. What its sentence mentions decides nothing."""
    told = {"code": "invalid_request", "message": "prompt: more than the model's context of 256"}
    said = job_error(replace(FAILED, error=told))
    assert (said.status, said.param, said.code, str(said)) == (400, None, "invalid_value", told["message"])


@pytest.mark.parametrize("error", TOLD, ids=str)
def test_it_passes_between_processes(error: Invalid) -> None:
    passed = pickle.loads(pickle.dumps(error))
    assert (passed.to_dict(), str(passed)) == (error.to_dict(), str(error))
    assert error.of("expand_prompt").to_dict() == Invalid("expand_prompt", error.message, error.code).to_dict()
