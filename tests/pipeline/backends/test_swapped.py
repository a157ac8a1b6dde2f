"""Models that share a backend draw what each draws on one of its own, and none records a graph again."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from contract.image import ImageParameters
from contract.plan import DeepCache
from core.batching.runner import Lane
from pipeline.backends.backend import ImageBackend, Widths
from pipeline.backends.graphs import GraphBackend
from pipeline.backends.phases import TEXT, VAE
from pipeline.backends.swapped import SharedBackends, SwappedBackend
from pipeline.extensions.asset_cache import ReadFile
from pipeline.families.family import ImageModel
from pipeline.memory_ledger import RequestCapacity
from pipeline.model_pool import ModelPool, weight_bytes
from pipeline.runner import ImageRunner
from tests.core.tape import Tape
from tests.pipeline import worlds
from tests.pipeline.backends.test_programs import SHAPES
from tests.pipeline.worlds import model, solo
from tests.pools import PoolStage, stages_of

worlds.MORE.update(SHAPES)
SHAPE, OTHER_SHAPE = SHAPES
WIDTHS, ALONE = Widths(4, 2, (2, 4)), Widths(2, 2, (2,))
CHANGED = {
    "base": (),
    "tuned": ("unet",),
    "twin": ("unet",),
    "retold": ("unet", "text_encoder", "text_encoder_2"),
    "relit": ("unet", "vae"),
    "relit too": ("unet", "vae"),
}  # fmt: skip
"""The parts that differ from the base model's."""


def altered(part: nn.Module, seed: int) -> nn.Module:
    """A copy of a part with other weights."""
    generator, other = torch.Generator().manual_seed(seed), copy.deepcopy(part)
    for tensor in (*other.parameters(), *other.buffers()):
        if tensor.is_floating_point():
            tensor.data.mul_(1 + 0.2 * torch.rand(tensor.shape, generator=generator))
        elif tensor.dtype == torch.int8:
            tensor.data.copy_(tensor.roll(seed))
    return other


def tuned(name: str) -> ImageModel:
    """A model of the shape whose changed parts are its own, and the others equal copies."""
    if name == OTHER_SHAPE:
        return replace(model(name), name=name, digest=name)
    base, seed = model(SHAPE), 1 + [*CHANGED].index(name)
    parts = {
        part: altered(own, 3 if name.startswith("relit") and part == "vae" else seed) if part in CHANGED[name]
        else copy.deepcopy(own)
        for part, own in base.parts.items() if isinstance(own, nn.Module)
    }  # fmt: skip
    return replace(base.with_parts(**parts), name=name, digest=name)


def parameters(seed: int) -> ImageParameters:
    cached = DeepCache(2, "block") if seed % 2 else None
    return ImageParameters("a red cat", seed, 32, 32, steps=4, deterministic=True, deepcache=cached)


class Shelf(PoolStage):
    """An engine over a pool of these models, whose backends are shared."""

    def __init__(self, names: list[str], *, host_bytes: int = 0) -> None:
        self.lane, self.capacity, self.tape = Lane("device"), RequestCapacity(16), Tape()
        self.shared = SharedBackends(self.lane)
        self.shared.capacity = self.capacity
        self.loads: list[str] = []
        pool = ModelPool(names, self.load, 2**40, host_bytes=host_bytes)
        pool.start()
        super().__init__(self.lane, pool, ())
        for name in names:
            pool.load(name)
            self.lane.call(lambda name=name: self.backend(name).prepare(measure_s=600))  # type: ignore[misc]

    def load(self, name: str) -> ReadFile[ImageRunner]:
        self.loads.append(name)
        own = tuned(name)
        backend = self.shared.backend_of(own, lambda: GraphBackend(own, WIDTHS, recorder=self.tape))
        runner = ImageRunner(backend, lane=self.lane, capacity=self.capacity)
        return ReadFile(runner, name, weight_bytes(runner), name)

    def backend(self, name: str) -> ImageBackend:
        runner: ImageRunner | None = self.pool.resident(name)
        assert runner is not None
        return runner.backend

    def draw(self, names: list[str], seeds: range) -> dict[tuple[str, int], bytes]:
        """Pictures of all models with all seeds, in one crowd."""
        futures = {(name, seed): self.add(parameters(seed), name) for seed in seeds for name in names}
        return {key: future.result(120).png() for key, future in futures.items()}


Shelves = Callable[..., Shelf]


@pytest.fixture
def shelves() -> Iterator[Shelves]:
    yield from stages_of(Shelf)


def alone(name: str, *seeds: int) -> dict[tuple[str, int], bytes]:
    runner = ImageRunner(GraphBackend(tuned(name), ALONE, recorder=Tape()))
    runner.prepare(measure_s=600)
    pictures = {(name, seed): solo(runner, parameters(seed)).png() for seed in seeds}
    runner.close()
    return pictures


def test_models_of_one_backend_draw_what_each_draws_on_its_own(shelves: Shelves) -> None:
    """Whatever parts are theirs, and though their steps alternate."""
    names = [*CHANGED]
    shelf = shelves(names)
    pictures = shelf.draw(names, range(1, 4))
    expected = {key: file for name in names for key, file in alone(name, 1, *(2,) * (name == "relit")).items()}
    assert len({*expected.values()}) == len(expected)
    assert expected == {key: pictures[key] for key in expected}


def test_a_further_model_records_nothing_but_text_and_holds_what_is_its_own(shelves: Shelves) -> None:
    shelf = shelves(["base", "tuned"])
    before = shelf.tape.recordings
    shelf.draw(["base", "tuned"], range(2))
    assert shelf.tape.recordings == before
    base, other = shelf.backend("base"), shelf.backend("tuned")
    assert other.model.parts["vae"] is base.model.parts["vae"] and other.phases[TEXT] is base.phases[TEXT]
    assert other.costs is base.costs and other.graphs is base.graphs
    sizes = {name: weight_bytes(shelf.pool.resident(name)) for name in ("base", "tuned")}  # type: ignore[arg-type]
    denoiser = sum(t.nbytes for t in other.model.denoiser.state_dict().values())
    assert sizes["tuned"] == 2 * denoiser, "its own, and that of the first model, which was copied aside for it"


def test_an_equal_vae_is_held_once_also_by_models_that_are_not_the_first(shelves: Shelves) -> None:
    shelf = shelves(["base", "relit", "relit too", "retold"])
    lit, too, told, base = (shelf.backend(name) for name in ("relit", "relit too", "retold", "base"))
    assert too.model.vae is lit.model.vae is not base.model.vae is told.model.vae
    assert too.phases[TEXT] is base.phases[TEXT] is not told.phases[TEXT]


def test_a_model_that_was_evicted_joins_again(shelves: Shelves) -> None:
    """Also the one that the backend was built with, while another is in memory, whose equal parts stay."""
    shelf = shelves([OTHER_SHAPE, "base", "tuned"])
    names = ["base", "tuned"]
    first = shelf.draw(names, range(2))
    shelf.pool.evict(["base"])
    gc.collect()
    assert shelf.pool.resident("base") is None
    other = shelf.load("relit").content.backend  # whose decoder takes the place of the one that is shared
    other.phases[VAE](torch.zeros(1, 4, 8, 8))
    assert shelf.draw(names, range(2)) == first
    assert shelf.loads.count("base") == 2


@pytest.mark.long
def test_a_model_in_the_hosts_memory_is_not_loaded_again(shelves: Shelves) -> None:
    """As many as fit there, those that were used last; one with text encoders of its own is closed."""
    names = ["base", "tuned", "twin", "retold"]
    denoiser = sum(tensor.nbytes for tensor in tuned("base").denoiser.state_dict().values())
    shelf = shelves(names, host_bytes=denoiser * 5 // 2)  # the first to join counts twice: with a copy of the base's
    first = shelf.draw(names, range(2))
    for name in ("retold", "twin", "tuned"):
        shelf.pool.evict([name])
        gc.collect()
    assert shelf.draw(names, range(2)) == first
    assert Counter(shelf.loads) == {"base": 1, "tuned": 1, "twin": 2, "retold": 2}


def test_a_backend_ends_with_the_last_of_its_models_and_another_architecture_has_its_own() -> None:
    lane = Lane("device")
    shared = SharedBackends(lane)
    backends = [
        shared.backend_of(each, lambda each=each: GraphBackend(each, WIDTHS, recorder=Tape()))  # type: ignore[misc]
        for each in map(tuned, ("base", "tuned", OTHER_SHAPE))
    ]
    other = backends.pop()
    assert isinstance(other, SwappedBackend) and other.graphs is not backends[0].graphs
    graphs = weakref.ref(backends[0].graphs)
    for _ in range(2):
        assert graphs() is not None
        backends.pop(0)
        gc.collect()
    assert graphs() is None
    lane.close()
