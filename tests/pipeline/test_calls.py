"""From the engine's tick to the kernel a step takes few calls: counted on the stacks of a real step, by a profiler."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from contract.image import ImageParameters
from contract.plan import DeepCache
from core.batching.engine import Engine
from core.batching.request import Request
from core.batching.runner import Lane
from core.cuda_graphs import CapturedGraph
from core.kernels.cpu.program import Program
from pipeline.backends.backend import ImageBackend
from pipeline.checkpoints import tiny
from pipeline.iterations import IterationBuilder
from pipeline.runner import ImageRunner
from tests.core.tape import Tape
from tests.pipeline import worlds
from tests.pipeline.worlds import backend_of, model
from unet_opt import unet

SHAPE = "heads-for-kernels"
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "internals" / "architecture.md"
MOST = 14  # calls, the kernel's with them
KERNELS = {
    "programs": (Program.run, 1),  # and the C function that it calls
    "torch": (unet.deep, 0),  # the denoiser as diffusers' modules compute it
    "graphs": (CapturedGraph.__call__, 1),  # and the graph's replay
}


worlds.MORE[SHAPE] = tiny.SDXLShape(heads=(1, 2))


def calls(frame: FrameType, first: CodeType) -> list[str]:
    """The product's functions on a stack, from that of the code `first` on; comprehensions are none of their own."""
    names: list[str] = []
    at: FrameType | None = frame
    while at is not None:
        path = Path(at.f_code.co_filename)
        ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("tests", ".venv")
        if ours and not at.f_code.co_name.endswith("comp>"):
            names.insert(0, f"{path.relative_to(ROOT)}:{at.f_code.co_qualname}")
        if at.f_code is first:
            return names
        at = at.f_back
    return []


@contextmanager
def profiled(kernel: Any) -> Iterator[dict[str, list[str]]]:
    """The longest line of calls of any step, by where it ends: a step is built, handed to the lane, in the kernel.

    Threads that start inside are observed.
    """
    ends = {IterationBuilder.denoise_step.__code__: "built", Lane.start.__code__: "started", kernel.__code__: "kernel"}
    found: dict[str, list[str]] = {}

    def observe(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in ends:
            first = Lane._run if frame.f_code is kernel.__code__ else Engine._tick
            stack, end = calls(frame, first.__code__), ends[frame.f_code]
            steps = end != "kernel" or any("denoise_step" in call for call in stack)
            if steps and len(stack) > len(found.get(end, ())):
                found[end] = stack

    threading.setprofile(observe)
    try:
        yield found
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def backend(name: str, kernels: ctypes.CDLL) -> ImageBackend:
    options: dict[str, Any] = {"programs": {"kernels": kernels}, "torch": {}, "graphs": {"fused": True}}[name]
    return backend_of(model(SHAPE), **options, **({"recorder": Tape()} if name == "graphs" else {}))


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_is_a_straight_line(name: str, kernels: ctypes.CDLL) -> None:
    kernel, more = KERNELS[name]
    side = model(SHAPE).native
    request = ImageParameters("a red cat", 1, side, side, steps=4, deepcache=DeepCache(interval=4))
    with profiled(kernel) as found:
        lane = Lane("device")
        runner = ImageRunner(backend(name, kernels), lane=lane)
        if name == "graphs":
            runner.prepare(measure_s=60.0)
            assert runner.recording.wait(60)
        with Engine([runner]) as engine:
            for number in range(2):
                engine.submit(Request(str(number), "image", request)).result(timeout=120)
        runner.close()
        lane.close()
    line = list(dict.fromkeys([*found["built"], *found["started"], *found["kernel"]]))
    assert line[0].endswith("Engine._tick") and any("compute" in call for call in line)
    assert len(line) + more <= MOST, "\n".join(line)
    if name == "programs":
        told = re.findall(r"^(core|pipeline|unet_opt)(/\S+\.py) +(\S+)", PAGE.read_text(), re.MULTILINE)
        assert [f"{room}{file}:{function}" for room, file, function in told] == [
            call.replace("<locals>.", "") for call in line
        ], "the page does not show the step as it is"
