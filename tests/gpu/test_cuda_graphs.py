"""CUDA's own recorder: replays, one memory for all, and recordings that fail in the middle."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core.cuda_graphs import CapturedGraph, CudaRecorder, GraphCache


def draw(seed: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def blend(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    y = torch.nn.functional.gelu(x @ weight.T)
    return {"sum": y.sum(1), "whole": y}


def test_a_replay_computes_on_what_it_is_given_now() -> None:
    captured = CapturedGraph(blend, (draw(1), draw(2)), {}, CudaRecorder(torch.device("cuda")))
    for seed in range(3, 9):
        x, weight = draw(seed), draw(seed + 20)
        for key, made in captured(x, weight).items():
            assert torch.equal(made, blend(x, weight)[key])


def test_graphs_of_many_widths_share_memory_and_do_not_mix() -> None:
    def wide(x: Tensor) -> Tensor:
        y = x.repeat(1, 4096)
        return (y * 2).exp().sum(1)

    graphs = GraphCache({"wide": wide}, CudaRecorder(torch.device("cuda")))
    for rows in (64, 32, 16, 8):  # the widest first: the others find room in its memory
        graphs.record("wide", rows, draw(0, rows))
    held = torch.cuda.memory_reserved()
    for rows in (60, 56, 48, 40):
        graphs.record("wide", rows, draw(0, rows))
    grown = torch.cuda.memory_reserved() - held
    assert grown < 64 * 64 * 4096 * 4, "four more graphs and not one activation more"
    for rows in (8, 60, 64, 16, 40, 32, 56, 48):
        assert torch.equal(graphs.run("wide", rows, draw(rows, rows)), wide(draw(rows, rows)))


def out_of_memory(x: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    return x * 2


def asks_the_host(x: Tensor) -> Tensor:
    return x * float(x.sum().item())  # which no graph can hold


def really_out_of_memory(x: Tensor) -> Tensor:
    huge = torch.cuda.get_device_properties(0).total_memory // 4
    if torch.cuda.is_current_stream_capturing():
        torch.empty(4 * huge, dtype=torch.float32, device="cuda")
    return x * 2


@pytest.mark.parametrize("broken", [out_of_memory, asks_the_host, really_out_of_memory])
def test_a_recording_that_fails_in_the_middle_disturbs_no_other(broken: Callable[..., Any]) -> None:
    graphs = GraphCache({"broken": broken, "blend": blend}, CudaRecorder(torch.device("cuda")))
    graphs.record("blend", 8, draw(1), draw(2))
    with pytest.raises(RuntimeError):  # of which torch's OutOfMemoryError is one
        graphs.record("broken", 8, draw(1))
    graphs.settle()
    assert not graphs.has("broken", 8)
    graphs.record("blend", 4, draw(1, 4), draw(2))
    for rows in (8, 4):
        made = graphs.run("blend", rows, draw(5, rows), draw(6))["whole"]
        assert torch.equal(made, blend(draw(5, rows), draw(6))["whole"])
    assert torch.equal(graphs.run("broken", 8, draw(7)), broken(draw(7)))


def test_garbage_is_collected_after_a_capture() -> None:
    """Graphs among it, of a model that is gone, would end the capture of the thread that collects it."""

    class Circle:
        own: Circle
        graph: CapturedGraph

    def busy(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            assert [[k] for k in range(50_000)], "would set off collections"
        return x * 2

    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.set_threshold(10_000, 1, 1)
    gc.enable()
    try:
        circle = Circle()
        circle.own = circle
        circle.graph = CapturedGraph(blend, (draw(1), draw(2)), {}, CudaRecorder(torch.device("cuda")))
        gone = weakref.ref(circle)
        del circle
        captured = CapturedGraph(busy, (draw(3),), {}, CudaRecorder(torch.device("cuda")))
        assert gone() is not None and gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        if not enabled:
            gc.disable()
    gc.collect()
    assert gone() is None and torch.equal(captured(draw(4)), draw(4) * 2)


def test_recorders_of_other_threads_may_wait_for_the_device_meanwhile() -> None:
    """A worker has two: text records when it meets new shapes, images in the background until all are recorded."""
    ended, failed = threading.Event(), list[BaseException]()

    def settle() -> None:
        recorder = CudaRecorder(torch.device("cuda"))
        try:
            while not ended.is_set():
                recorder.settle()
        except BaseException as error:
            failed.append(error)

    other = threading.Thread(target=settle)
    other.start()
    try:
        graphs = GraphCache({"blend": blend}, CudaRecorder(torch.device("cuda")))
        for rows in range(1, 200):
            graphs.record("blend", rows, draw(1, rows), draw(2))
    finally:
        ended.set()
        other.join()
    assert not failed, failed
    assert torch.equal(graphs.run("blend", 8, draw(3), draw(4))["whole"], blend(draw(3), draw(4))["whole"])
