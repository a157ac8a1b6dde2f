"""Provides two running services for the fault tests: one with the tiny model, one with a stand-in for poison jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.rounds import Gallery
from tests.faults.stack import Stack

# Short, so that a test does not wait long for a lease; long enough that a busy machine does not lose one.
SHORT = {"lease_s": "4", "drain_s": "0.1", "kernels": "false"}  # which nothing so small is worth compiling for


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, switches = tmp_path_factory.mktemp("pictures"), ("--real", "--text")
    with Stack(folder, switches=switches, settings=SHORT, niceness=0, preload=True) as stack:
        yield stack


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, settings = tmp_path_factory.mktemp("stand-ins"), SHORT | {"lease_s": "2.5"}
    with Stack(folder, switches=("--step", "0.02"), settings=settings, niceness=0, preload=True) as stack:
        yield stack


@pytest.fixture(scope="module")
def gallery() -> Gallery:
    return Gallery()
