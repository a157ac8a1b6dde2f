"""Variants in the cache: made once, whole or not at all, by one process while others wait."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from pipeline.families.sdxl import FAMILY
from pipeline.quantization import variant_cache
from pipeline.quantization.calibration import default_prompts
from pipeline.quantization.variant_cache import CachedVariant
from tests.children import in_fork

PROMPTS = 32  # of the bundled ones: calibration is tests/pipeline/quantization/test_calibration.py's


@pytest.fixture(autouse=True)
def _few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_cache, "default_prompts", lambda: default_prompts()[:PROMPTS])


class Opener:
    """Loads the model, and counts how often."""

    def __init__(self, kernels: ctypes.CDLL | None) -> None:
        self.kernels, self.count = kernels, 0

    def __call__(self) -> tuple[ImageModel, ctypes.CDLL | None]:
        self.count += 1
        return load(tiny.TINY), self.kernels


def place(cache: Path, **other: Any) -> CachedVariant:
    given: dict[str, Any] = {"source": load(tiny.TINY).digest, "scheme": "int8", "precision": "fp32", **other}
    return variant_cache.find(cache, family=FAMILY, **given)


def test_a_variant_is_made_once_and_found_again(kernels: ctypes.CDLL, tmp_path: Path) -> None:
    found, opener, told = place(tmp_path), Opener(kernels), list[tuple[int, int]]()
    assert not found.exists
    found.make(opener, tell=lambda done, total: told.append((done, total)))
    assert told == [(done, PROMPTS) for done in range(0, PROMPTS + 1, 8)]
    assert found.exists and place(tmp_path).exists
    place(tmp_path).make(opener)
    assert opener.count == 1
    model = load(tiny.TINY, precision="int8", unet=found.denoiser)
    assert model.precision == "int8"
    assert {path.name for path in found.folder.iterdir()} == {"unet-int8", "vae-int8"}


@pytest.mark.parametrize("other", [{"source": "another"}, {"scheme": "fp8"}, {"precision": "bf16"}])
def test_what_it_was_made_from_is_in_its_name(other: dict[str, Any], tmp_path: Path) -> None:
    assert place(tmp_path).folder != place(tmp_path, **other).folder
    assert place(tmp_path) == place(tmp_path)


def test_a_process_that_is_killed_leaves_no_half_and_its_work_is_gone_on_with(
    kernels: ctypes.CDLL, tmp_path: Path
) -> None:
    found, told = place(tmp_path), list[int]()
    model = load(tiny.TINY)

    def kill(done: int, total: int) -> None:
        if done == 24:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(lambda: found.make(lambda: (model, None), tell=kill)) == -signal.SIGKILL
    assert not found.exists and not found.folder.exists()
    found.make(Opener(kernels), tell=lambda done, total: told.append(done))
    assert told[0] == 24 and found.exists
    assert not list(tmp_path.rglob("*.statistics")) and not list(tmp_path.rglob("*.part"))


def test_a_second_process_waits_for_the_first_and_says_so(kernels: ctypes.CDLL, tmp_path: Path) -> None:
    """In two threads: the lock is the file's, which threads with descriptors of their own take as processes do."""
    opened, waiting, go_on = threading.Event(), threading.Event(), threading.Event()
    first, second = Opener(kernels), Opener(kernels)

    def slowly() -> tuple[ImageModel, ctypes.CDLL | None]:
        opened.set()
        assert go_on.wait(60)
        return first()

    threads = [threading.Thread(target=lambda: place(tmp_path).make(slowly))]
    threads[0].start()
    assert opened.wait(60)
    threads.append(threading.Thread(target=lambda: place(tmp_path).make(second, wait=waiting.set)))
    threads[1].start()
    assert waiting.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(120)
    assert place(tmp_path).exists and (first.count, second.count) == (1, 0)


def test_a_place_that_lost_a_part_is_made_anew(kernels: ctypes.CDLL, tmp_path: Path) -> None:
    found, opener = place(tmp_path), Opener(kernels)
    found.make(opener)
    (found.folder / "vae-int8" / "quantization.json").unlink()
    assert not found.exists
    found.make(opener)
    assert found.exists and opener.count == 2


def test_a_cache_that_takes_no_more_is_said_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ModelError, match=r"cache cannot be used \(.*file.*DIPTYCH_CACHE_DIR"):
        place(tmp_path / "file").make(Opener(None))
    full, model = place(tmp_path), load(tiny.TINY)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # Python ignores its signal
    try:
        with pytest.raises(ModelError, match=r"the cache cannot be used .*DIPTYCH_CACHE_DIR names another"):
            full.make(lambda: (model, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not full.exists


def test_a_model_that_cannot_be_quantized_is_not_blamed_on_the_cache(tmp_path: Path) -> None:
    def broken() -> tuple[ImageModel, None]:
        model = load(tiny.TINY)
        model.denoiser.conv_in.weight.data.fill_(float("nan"))
        return model, None

    with pytest.raises(ModelError, match=r"cannot be quantized to int8: .*range is not finite") as caught:
        place(tmp_path).make(broken)
    assert "DIPTYCH_CACHE_DIR" not in str(caught.value) and not place(tmp_path).exists
