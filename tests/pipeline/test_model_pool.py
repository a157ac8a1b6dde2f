"""Several models behind one runner, on the real engine: pictures as alone, within the memory they may take."""

from __future__ import annotations

import copy
import functools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import pytest

from contract.errors import Invalid
from contract.image import ImageParameters
from core.batching.request import Request
from core.batching.runner import Lane, OutOfMemory
from pipeline.backends.torch_backend import TorchBackend
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.asset_cache import ReadFile
from pipeline.memory_ledger import RequestCapacity
from pipeline.model_pool import ModelPool
from pipeline.runner import ImageRunner
from tests.pipeline.worlds import model, solo
from tests.pools import PoolStage, stages_of

KINDS = {"first": "plain", "second": "two-resnets", "third": "v-prediction", "fourth": "many-heads"}
UNIT = 100  # bytes that each model counts


def wanted(seed: int, **fields: Any) -> ImageParameters:
    return ImageParameters("a red cat", seed, 32, 32, **{"steps": 4, "deterministic": True, **fields})


class Stage(PoolStage):
    """An engine over a pool of the models of `KINDS`, with room for so many at once."""

    def __init__(
        self,
        room: int,
        *,
        before: Callable[[str], object] = lambda name: None,
        served: Iterable[str] = KINDS,
        sizes: Mapping[str, int] = MappingProxyType({}),
        copies: bool = False,
        **options: Any,
    ) -> None:
        self.lane, self.capacity = Lane("device"), RequestCapacity(8)
        self.loads: Counter[str] = Counter()
        self.sizes = sizes
        self.copies = copies  # of the weights, each time that a model is loaded
        self.attempts: Counter[str] = Counter()
        self.now = 0.0  # seconds that the pool's clock is ahead
        self._before = before
        pool = ModelPool([*KINDS], self.load, room * UNIT, clock=lambda: time.monotonic() + self.now, **options)
        self.first = pool.start()
        super().__init__(self.lane, pool, served)

    def load(self, name: str) -> ReadFile[ImageRunner]:
        self.attempts[name] += 1
        self._before(name)
        self.loads[name] += 1
        own = copy.deepcopy(model(KINDS[name])) if self.copies else model(KINDS[name])
        runner = ImageRunner(TorchBackend(own), lane=self.lane, capacity=self.capacity)
        return ReadFile(runner, own.digest, self.sizes.get(name, UNIT), name)

    def submit(self, name: str, seed: int, **fields: Any) -> Future[Any]:
        return self.add(wanted(seed, **fields), name)


Stages = Callable[..., Stage]


@pytest.fixture
def stages() -> Iterator[Stages]:
    yield from stages_of(Stage)


@functools.cache
def alone(name: str, seed: int) -> bytes:
    file: bytes = solo(ImageRunner(TorchBackend(model(KINDS[name]))), wanted(seed)).png()
    return file


@pytest.mark.parametrize("room", [4, 2])
def test_pictures_of_four_models_are_those_that_each_draws_alone(stages: Stages, room: int) -> None:
    """Whether all of them fit, or the first and one more at a time."""
    stage = stages(room)
    before = stage.loads.total()
    futures = {(name, seed): stage.submit(name, seed) for seed in (1, 2) for name in KINDS}
    pictures = {key: future.result(120).png() for key, future in futures.items()}
    assert pictures == {(name, seed): alone(name, seed) for name, seed in pictures}
    assert {getattr(tick.group, "model", "") for tick in stage.ticks} == {*KINDS}
    assert stage.loads["first"] == 1 and (stage.loads.total() - before > 0) == (room == 2)
    assert sum(stage.pool.resident(name) is not None for name in KINDS) <= room
    assert stage.pool.held() == 0


def test_requests_of_a_model_share_its_batches(stages: Stages) -> None:
    stage = stages(4)
    hold = threading.Event()
    stage.lane.start(hold.wait, lambda _: {})
    futures = [stage.submit(name, seed, deterministic=False) for seed in (1, 2, 3) for name in ("first", "third")]
    hold.set()
    for future in futures:
        future.result(60)
    deep = [tick for tick in stage.ticks if tick.group.phase == "deep"]
    assert len(deep) == 8 and {(tick.group.model, tick.rows) for tick in deep} == {("first", 6), ("third", 6)}


def test_others_are_drawn_while_a_model_is_loaded(stages: Stages) -> None:
    loading, release = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if stage is not None and name == "second":
            loading.set()
            assert release.wait(60)

    stage: Stage | None = None
    stage = stages(2, before=before)
    assert stage.pool.resident("second") is None and stage.pool.resident("fourth") is not None
    cold = stage.submit("second", 1)
    assert loading.wait(60)
    for seed in range(3):
        assert stage.submit("first", seed).result(60) and not cold.done()
    release.set()
    assert cold.result(60).png() == alone("second", 1)


def test_nobody_waits_for_ever_for_room(stages: Stages) -> None:
    """Requests of a model that is in memory come without end; another is loaded all the same, in its place."""
    stage = stages(2)
    stop, drawn = threading.Event(), Counter[str]()

    def flood() -> None:
        futures: list[Future[Any]] = []
        while not stop.is_set():
            futures = [future for future in futures if not future.done()]
            if len(futures) < 4:
                futures.append(stage.submit("fourth", drawn["fourth"]))
                drawn["fourth"] += 1
            time.sleep(0.002)
        for future in futures:
            future.result(60)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for name in ("second", "third"):
            assert stage.submit(name, 5).result(60).png() == alone(name, 5)
    finally:
        stop.set()
        thread.join()
    assert drawn["fourth"] > 8 and stage.loads["fourth"] > 1


def test_what_is_evicted_is_freed(stages: Stages) -> None:
    stage = stages(2, copies=True)
    stage.submit("second", 1).result(60)
    runner = stage.pool.resident("second")
    assert runner is not None
    weights = weakref.ref(runner.model.denoiser.conv_in.weight)
    del runner
    stage.submit("third", 1).result(60)
    wait_for(lambda: weights() is None)
    assert stage.pool.resident("second") is None


def test_idle_models_leave_and_the_first_stays(stages: Stages) -> None:
    stage = stages(4, idle_s=0.2)
    wait_for(lambda: [name for name in KINDS if stage.pool.resident(name) is not None] == ["first"])
    assert stage.submit("third", 3).result(60).png() == alone("third", 3)


def test_a_model_that_does_not_load_fails_its_requests_alone_and_is_tried_again(stages: Stages) -> None:
    broken = threading.Event()

    def before(name: str) -> None:
        if broken.is_set() and name == "second":
            raise ModelError("second: its file is gone")

    stage = stages(2, before=before)
    broken.set()
    beside, cold = stage.submit("first", 1), stage.submit("second", 1)
    with pytest.raises(ModelError, match="its file is gone"):
        cold.result(60)
    assert beside.result(60).png() == alone("first", 1)
    loads = stage.attempts["second"]
    with pytest.raises(ModelError, match="its file is gone"):
        stage.submit("second", 2).result(60)
    assert stage.attempts["second"] == loads, "not again at once"
    broken.clear()
    stage.now += 10
    assert stage.submit("second", 1).result(60).png() == alone("second", 1)


def test_bad_requests_are_refused_whether_or_not_the_model_is_in_memory(stages: Stages) -> None:
    stage = stages(2)
    with pytest.raises(Invalid, match="none of this worker") as refused:
        stage.submit("fifth", 1)
    assert refused.value.field == "model"
    for name in ("first", "second"):
        with pytest.raises(Invalid, match=r"^scheduler:"):
            stage.submit(name, 1, scheduler="wizard").result(60)
    with pytest.raises(Invalid, match=r"^lora:"):  # a cold model is read for that, before the engine has it
        stage.submit("third", 1, lora="ink").result(60)
    assert stage.pool.resident("third") is not None


def test_a_request_that_leaves_while_its_model_is_loaded_holds_up_no_other(stages: Stages) -> None:
    stage = stages(2)
    future = stage.engine.submit(Request("gone", "image", wanted(1), model="second"))
    stage.engine.abort("gone")
    assert stage.submit("third", 2).result(60).png() == alone("third", 2)
    assert future.exception(60) is not None


def test_a_model_that_does_not_fit_beside_the_first_is_not_served(stages: Stages) -> None:
    stage = stages(2, served=("first", "second"), sizes={"third": UNIT + 1})
    with pytest.raises(ModelError, match=r"^third: needs 201 bytes with first, and models have 200$"):
        stage.pool.load("third")
    assert stage.pool.resident("third") is None
    with pytest.raises(Invalid, match="none of this worker"):
        stage.submit("third", 1)
    assert stage.submit("second", 1).result(60).png() == alone("second", 1)


def test_memory_that_ran_out_for_an_evicted_model_is_no_matter_to_others(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stages(2)
    fails = {"second", "third"}
    launch = ImageRunner.launch

    def fail(self: ImageRunner, requests: Any) -> Any:
        if len(requests) > 1 and requests[0].model in fails:
            fails.discard(requests[0].model)
            raise OutOfMemory("too wide")
        return launch(self, requests)

    monkeypatch.setattr(ImageRunner, "launch", fail)
    for name in ("second", "third", "first"):
        futures = [stage.submit(name, seed) for seed in (1, 2, 3)]
        assert [future.result(60).png() for future in futures] == [alone(name, seed) for seed in (1, 2, 3)]
    assert not fails and stage.engine.alive


def test_patience_is_for_one_that_waits_now(stages: Stages) -> None:
    """Who left an hour ago does not make the next request of that model stop all others at once."""
    stage = stages(2)
    hold = threading.Event()
    stage.submit("fourth", 1).result(60)
    stage.lane.start(hold.wait, lambda _: {})
    running = stage.submit("fourth", 2)
    stage.engine.submit(Request("gone", "image", wanted(1), model="second"))
    wait_for(lambda: stage.pool._waiting)
    stage.engine.abort("gone")
    stage.now += 3600
    later = stage.submit("second", 2)
    wait_for(lambda: stage.pool._waiting["second"][1] > 3000)
    beside = stage.submit("fourth", 3)
    wait_for(lambda: stage.pool.held() == 2)
    hold.set()
    for future, name, seed in ((running, "fourth", 2), (beside, "fourth", 3), (later, "second", 2)):
        assert future.result(60).png() == alone(name, seed)


def wait_for(seen: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_one_load_on_a_busy_machine_is_not_what_a_model_takes_to_load_from_then_on(stages: Stages) -> None:
    """Workers that would have to load a model take no job of it for as long as a load takes."""
    begun: list[Stage] = []

    def slowly(name: str) -> None:
        for stage in begun:
            stage.now += 300.0

    stage = stages(2, before=slowly)
    stage.submit("third", 1).result(60)
    begun.append(stage)
    loads, at_first_s = stage.loads["second"], stage.pool.load_s("second")
    stage.submit("second", 1).result(60)
    assert stage.loads["second"] == loads + 1
    assert 0 < stage.pool.load_s("second") <= at_first_s < 300
