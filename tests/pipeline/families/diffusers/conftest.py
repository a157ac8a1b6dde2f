"""Provides small pipelines of diffusers in folders, and runners of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.batching.runner import Lane
from pipeline.families.diffusers import checkpoint
from pipeline.families.diffusers.runner import DiffusersRunner
from tests.pipeline.families.diffusers import pipelines

Folders = Callable[[str], Path]
Runners = Callable[[str], DiffusersRunner]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a pipeline by the name of its builder, written once."""
    root = tmp_path_factory.mktemp("pipelines")
    return lambda name: root / name if (root / name).is_dir() else pipelines.save(name, root)


@pytest.fixture(scope="session")
def runners(folders: Folders) -> Iterator[Runners]:
    """The runner of such a pipeline on a lane that all share."""
    lane, loaded = Lane("pipelines"), dict[str, DiffusersRunner]()

    def runner(name: str) -> DiffusersRunner:
        if name not in loaded:
            model = checkpoint.load(str(folders(name)), precision="fp32", device="cpu")
            loaded[name] = DiffusersRunner(model, lane=lane, max_requests=4)
        return loaded[name]

    yield runner
    lane.close()
