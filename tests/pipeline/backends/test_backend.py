"""What backends have in common: widths, the words of fingerprints, and the size of a class."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.backend import BatchGroup, ImageBackend, Widths, executables
from pipeline.backends.torch_backend import TorchBackend
from tests.pipeline.worlds import model

ROWS = st.integers(2, 64)


@given(ROWS, ROWS, st.lists(st.integers(1, 128)))
def test_widths_are_those_that_fit_and_the_deterministic_one(rows: int, fixed: int, buckets: list[int]) -> None:
    found = Widths(rows, fixed, tuple(buckets)).descending
    assert found == sorted(set(found), reverse=True) and fixed in found
    assert {*found} - {fixed} == {bucket for bucket in buckets if bucket <= rows} - {fixed}


@pytest.mark.parametrize("given", [{"max_rows": 1}, {"deterministic_rows": 1}])
def test_fewer_rows_than_guidance_needs_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 2"):
        Widths(**given)


@dataclass
class Told(ImageBackend):
    words: str

    def executable(self, mode: str) -> str:
        return mode or self.words


@pytest.mark.parametrize(
    ("words", "mode", "said"),
    [
        (("eager or compiled",), "", "eager or compiled"),
        (("eager", "kernels"), "", "eager and kernels"),
        (("eager", "eager or compiled"), "", "eager or compiled"),
        (("eager", "eager or compiled"), "eager", "eager"),
        (("eager", "eager"), "", "eager"),
    ],
)
def test_a_fingerprint_says_what_all_its_backends_may_have_run(words: tuple[str, ...], mode: str, said: str) -> None:
    assert executables(mode, map(Told, words)) == said  # type: ignore[abstract]


def test_costs_of_what_never_ran_grow_with_rows() -> None:
    """As the scheduler asks of all that waits, before anything is measured."""
    backend = TorchBackend(model("plain"))
    group = BatchGroup("deep", (32, 32))
    seconds = [backend.plan(group, rows).seconds for rows in (1, 2, 8, 200)]
    assert seconds == sorted(seconds) and seconds[0] > 0
