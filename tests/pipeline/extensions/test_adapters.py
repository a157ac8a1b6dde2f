"""Which LoRAs are kept: the last used within a budget, those in use in any case; files that change; many threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import NotYet
from core.ops import branches
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from pipeline.extensions import lora_file
from pipeline.extensions.adapters import LoraFolder, LoraLease
from tests.core.quant.stage import kernels
from tests.pipeline import loras
from tests.pipeline.extensions.checks import HeldReads
from tests.pipeline.worlds import Crank, Watching, apart, solo

LAYERS = {"unet": loras.UNET[:2]}
NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def model() -> ImageModel:
    return load(tiny.TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: ImageModel) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(NAMES):
        loras.write(model, folder, name, seed, layers=LAYERS)
    loras.write(model, folder, "big", layers=LAYERS, rank=20)
    return folder


@pytest.fixture(scope="module")
def one(model: ImageModel) -> int:
    """Bytes of one LoRA."""
    return sum(4 * part.numel() for pair in loras.matrices(model, 0, layers=LAYERS).values() for part in pair)


def taken(adapters: LoraFolder, text: str) -> LoraLease:
    adapters.check(text)
    found = adapters.take(text)
    assert found is not None
    return found


def hat(lora: str = "", steps: int = 2) -> ImageParameters:
    return ImageParameters("a hat", 1, 32, 32, steps=steps, lora=lora)


def test_what_was_let_go_before_its_turn_is_read_once_more(folder: Path, model: ImageModel, one: int) -> None:
    adapters = LoraFolder(folder, model, one)
    adapters.check("a")
    adapters.check("b")
    assert list(adapters.held) == ["b"]
    held = adapters.take("a")
    assert held is not None
    (use,) = adapters.uses(held)
    assert use.factors and adapters.cache.reads == 3
    assert adapters.uses(held)[0].factors is use.factors and adapters.cache.reads == 3


def test_what_never_fits_is_refused_by_name(folder: Path, model: ImageModel, one: int) -> None:
    adapters = LoraFolder(folder, model, 2 * one)
    with pytest.raises(ModelError, match=r"^lora big: needs \d+ bytes"):
        adapters.check("big")
    with pytest.raises(ModelError, match=r"^lora a and b and c: needs"):
        adapters.check("a,b,c")
    assert adapters.cache.reads == 3 and sum(adapters.held.values()) <= 2 * one


def test_a_file_that_changes_is_read_anew_and_who_has_begun_keeps_the_old(
    tmp_path: Path, model: ImageModel, one: int
) -> None:
    path = loras.write(model, tmp_path, "a", 1, layers=LAYERS)
    adapters = LoraFolder(tmp_path, model, 4 * one)
    before = taken(adapters, "a")
    (old,) = adapters.uses(before)
    loras.write(model, tmp_path, "a", 2, layers=LAYERS)
    os.utime(path, ns=(1, 1))
    after = taken(adapters, "a")
    (new,) = adapters.uses(after)
    assert new.digest != old.digest and adapters.uses(before)[0].digest == old.digest
    path.unlink()
    with pytest.raises(ModelError, match=r"there is no a\.safetensors in the LoRA folder"):
        adapters.check("a")
    assert adapters.asset_names() == []
    for held in (before, after):
        adapters.cache.give(held.files)
    assert adapters.cache._pinned == 0


@given(
    steps=st.lists(st.tuples(st.sampled_from(("check", "take", "give")), st.sampled_from((*NAMES, "a,c"))), max_size=40)
)
@settings(max_examples=40)
def test_the_books_balance_whatever_comes(
    steps: list[tuple[str, str]], folder: Path, model: ImageModel, one: int
) -> None:
    adapters, held = LoraFolder(folder, model, 2 * one), list[tuple[set[str], LoraLease]]()

    def in_use() -> set[str]:
        return set[str]().union(*(names for names, _ in held))

    for what, text in steps:
        names = {*text.split(",")}
        if what == "give":
            if held:
                adapters.cache.give(held.pop(0)[1].files)
        else:
            adapters.check(text)
        if what == "take":
            found = adapters.take(text)
            assert (found is None) == (bool(held) and len(in_use() | names) > 2)
            if found is not None:
                adapters.uses(found)
                held.append((names, found))
        assert in_use() <= set(adapters.held) and adapters.cache._pinned == len(in_use()) * one
        assert sum(adapters.held.values()) <= 3 * one, "one more at most, which was read this moment"
    for _, found in held:
        adapters.cache.give(found.files)
    assert sum(adapters.held.values()) <= 2 * one and adapters.cache._pinned == 0


def test_many_threads_at_once(folder: Path, model: ImageModel, one: int) -> None:
    adapters = LoraFolder(folder, model, 2 * one)

    def work(name: str) -> None:
        for _ in range(30):
            adapters.check(name)
            if (found := adapters.take(name)) is not None:
                assert [use.name for use in adapters.uses(found)] == [name]
                adapters.cache.give(found.files)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, NAMES * 2))
    assert adapters.cache._pinned == 0 and sum(adapters.held.values()) <= 2 * one


def test_requests_wait_for_room_in_the_engine_and_all_are_drawn(folder: Path, model: ImageModel, one: int) -> None:
    names, drawn = (*NAMES, "a,b"), []
    for room in (100 * one, 2 * one):
        crank = Crank(Watching(model, loras=folder, lora_bytes=room))
        for name in names:
            crank.submit(name, hat(name))
        drawn.append(crank.pictures())
    wide, narrow = drawn
    assert wide.keys() == narrow.keys() == {*names}
    assert all(apart(wide[name], narrow[name]) <= 1 for name in names)


def test_a_request_that_waits_for_room_delays_none_that_needs_no_lora(
    folder: Path, model: ImageModel, one: int
) -> None:
    """It keeps its place: no request with a LoRA that comes later is admitted before it."""
    crank = Crank(Watching(model, loras=folder, lora_bytes=one))
    crank.submit("long", hat("a", 30), tenant="long")
    crank.turn()
    crank.submit("waiting", hat("b"), tenant="waiting")
    later = crank.submit("later", hat("a"), tenant="later")
    crank.submit("plain", hat(), tenant="plain")
    while "plain" not in crank.ended:
        assert "long" not in crank.ended, "the plain picture waited for a file that it does not use"
        crank.turn()
    while "waiting" not in crank.ended:
        assert later.started is None, "a later request took the room first"
        crank.turn()
    assert crank.pictures().keys() == {"long", "waiting", "later", "plain"}


def test_steps_of_others_go_on_while_a_lora_is_read(
    folder: Path, model: ImageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was evicted before its request was admitted."""
    wanted = {name: hat(name, 4) for name in ("a", "b")}
    expected = {name: solo(Watching(model, loras=folder), asked) for name, asked in wanted.items()}
    runner = Watching(model, loras=folder)
    crank = Crank(runner)
    crank.submit("a", wanted["a"])
    crank.turn()
    crank.submit("b", wanted["b"])
    reads = HeldReads(monkeypatch, lora_file)
    runner.folder("lora").cache._files["b"].content = None  # as if others had needed the room
    while "a" not in crank.ended:
        crank.turn()
    assert reads.begun.wait(60)
    reads.go_on.set()
    drawn = crank.pictures()
    assert all(apart(drawn[name], expected[name]) == 0 for name in wanted)


@pytest.mark.parametrize("packs", [False, True])
def test_nothing_of_a_file_is_computed_on_the_threads_that_take_steps(
    packs: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, converting, checking and packing run on the loader's own threads, also of a file that was evicted."""
    found: list[tuple[str, str]] = []

    def spied(where: Any, name: str) -> None:
        real = getattr(where, name)

        def spy(*given: Any, **named: Any) -> Any:
            found.append((name, threading.current_thread().name))
            return real(*given, **named)

        monkeypatch.setattr(where, name, spy)

    for name in ("read", "converted", "check_finite"):
        spied(lora_file, name)
    spied(branches, "_pack")
    model = load(tiny.TINY)
    runner = Watching(model, loras=folder, kernels=kernels() if packs else None)
    crank = Crank(runner)
    for name in ("a", "b,c"):
        crank.submit(name, hat(name))
    runner.folder("lora").cache._files["a"].content = None  # as if others had needed the room
    crank.pictures()
    runner.close()
    assert {name for name, _ in found} == {"read", "converted", "check_finite"} | ({"_pack"} if packs else set())
    assert {thread for _, thread in found} == {"lora a", "lora b", "lora c"}


def test_what_is_not_admitted_says_what_it_lacks_and_holds_nothing(folder: Path, model: ImageModel, one: int) -> None:
    """Its files before the room that all share: who lacks both must not delay those who need no files."""
    runner = Watching(model, loras=folder, lora_bytes=one, max_requests=1)
    first, other, same = (Request(name, "image", hat(name[0])) for name in ("a", "b", "a2"))
    for request in (first, other, same):
        runner.check(request)
    assert runner.admit(first) is None
    assert runner.admit(other) == NotYet("lora")
    assert runner.admit(same) == NotYet()
    assert runner.folder("lora").cache._files["a"].pins == 1
    runner.release(first)
    assert runner.folder("lora").cache._pinned == runner.held() == runner.holdings.memory.taken == 0
    runner.close()
