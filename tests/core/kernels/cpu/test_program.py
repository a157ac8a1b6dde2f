"""Programs: buffers are lent and given back, calls run in order, and Python and C++ mean the same structures."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kernels.cpu import calls
from core.kernels.cpu.program import Program, pack_float
from tests.core.quant.stage import kernels, normal, threads

Step = st.tuples(st.sampled_from((4, 8, 12)), st.integers(0, 9))
Steps = Annotated[list[tuple[int, int]], st.lists(Step, max_size=30)]


def test_python_and_the_kernels_agree_on_structures() -> None:
    for structure in calls.STRUCTURES:
        assert kernels().diptych_size(structure.KIND) == ctypes.sizeof(structure)
    assert sorted(structure.KIND for structure in calls.STRUCTURES) == list(range(len(calls.STRUCTURES)))


def test_a_library_of_other_structures_is_refused() -> None:
    other: Any = SimpleNamespace(diptych_size=lambda kind: 8)
    with pytest.raises(RuntimeError, match="the kernels and Python disagree on Product"):
        Program(other)


def test_a_buffer_that_was_given_back_is_lent_again_for_equal_size_and_type_only() -> None:
    program = Program(kernels())
    first = program.buffer(4, 6)
    program.give_back(first, None)
    assert program.buffer(3, 8).data_ptr() == first.data_ptr()
    assert program.buffer(24).data_ptr() != first.data_ptr()
    other = program.buffer(24, dtype=torch.uint8)
    program.give_back(other)
    assert program.buffer(25).data_ptr() != other.data_ptr()
    assert program.size_bytes == 4 * 24 + 4 * 24 + 24 + 4 * 25


def test_what_is_given_back_twice_or_is_no_buffer_is_refused() -> None:
    program = Program(kernels())
    held = program.buffer(4, 6)
    for other in (torch.zeros(4, 6), held[:2], held[1:]):
        with pytest.raises(ValueError, match="is no buffer in use"):
            program.give_back(other)
    program.give_back(held)
    with pytest.raises(ValueError, match="is no buffer in use"):
        program.give_back(held)
    with pytest.raises(ValueError, match="holds nothing"):
        program.buffer(3, 0)


@settings(max_examples=40)
@given(...)
def test_no_two_buffers_in_use_are_one(steps: Steps) -> None:
    program = Program(kernels())
    held: list[torch.Tensor] = []
    for count, which in steps:
        if which < len(held):
            program.give_back(held.pop(which))
        else:
            held.append(program.buffer(count))
        assert len({buffer.data_ptr() for buffer in held}) == len(held)


def test_what_calls_point_into_stays_alive() -> None:
    program = Program(kernels())
    weights = pack_float(kernels(), normal(1, 64, 1, 64), normal(2, 64))
    out = program.product(normal(0, 64, 64), weights, grid=(1, 1, 64))
    del weights
    assert len(program) == 1
    for _ in range(20):  # memory that was let go would be taken
        torch.full((64, 64), torch.nan)
    program.run()
    assert torch.allclose(out, normal(0, 64, 64) @ normal(1, 64, 64).t() + normal(2, 64), atol=1e-4)


def test_a_program_has_torchs_threads_whichever_thread_runs_it() -> None:
    """OpenMP's own setting is each thread's: one that is new would take every core."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    openmp = ctypes.CDLL(next(line.split()[-1] for line in maps if "libgomp" in line))
    program, found = Program(kernels()), []
    program.quantize(torch.zeros(2, 4), torch.ones(4))

    def run() -> None:
        found.append(openmp.omp_get_max_threads())
        program.run()
        found.append(openmp.omp_get_max_threads())

    with threads(3):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [1, 3]


def test_the_interpreter_goes_on_while_a_program_runs() -> None:
    program = Program(kernels())
    weights = pack_float(kernels(), normal(0, 256, 1, 256), None)
    for _ in range(40):
        program.product(torch.zeros(2048, 256), weights, grid=(1, 1, 2048))
    program.run()
    ticks, done = 0, threading.Event()
    thread = threading.Thread(target=lambda: (program.run(), done.set()))
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 3
