"""Some hundred bodies drawn from the grammars of forms and pictures, at a real API process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from api.pictures.codec import measure
from tests.faults.lone_api import LoneApi
from tests.faults.uploads import Body, _pictures, bodies, fault, site, split


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoneApi]:
    with site(tmp_path_factory.mktemp("site")) as running:
        yield running


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies)
def test_a_hostile_body_is_refused_by_name(running: LoneApi, body: Body) -> None:
    assert fault(body.send(running.client)) is None


def test_the_grammar_begins_with_sound_pictures() -> None:
    for data in _pictures():
        assert b"".join(split(data)) == data and len(split(data)) >= 2
        assert measure(None, [data])[0]["width"] in (24, 40)
