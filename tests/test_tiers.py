"""Tests the choice of cases for the quick tier: it has every value and every pair, and few cases."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests import test_parallel
from tests.tiers import covering


def test_few_cases_have_every_value_and_every_pair() -> None:
    cases = [{"a": a, "b": b, "c": c} for a, b, c in itertools.product(range(4), range(3), range(2))]
    assert len(covering(cases, 1)) == 4
    pairs = {tuple(cases[k][name] for name in ("a", "b")) for k in covering(cases, 2)}
    assert pairs == set(itertools.product(range(4), range(3))) and len(covering(cases, 2)) < 16
    assert covering([{}], 2) == {0}


def test_other_cases_are_long_and_a_case_that_is_none_is_named(tmp_path: Path) -> None:
    test = (
        "import pytest\n@pytest.mark.quick({})\n@pytest.mark.parametrize('x', ['a', 'b', 'c'])\ndef test_it(x): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    quick\n    long\n")
    for mark, count in (("'b'", 1), ("0, 'c'", 2), ("", 3)):
        (tmp_path / "test_made.py").write_text(test.format(mark))
        done = test_parallel.run(tmp_path, "-p", "tests.tiers", "-m", "not long")
        assert f"{count} passed" in done.stdout, done.stdout
    (tmp_path / "test_made.py").write_text(test.format("'d'"))
    assert "has no case 'd'" in test_parallel.run(tmp_path, "-p", "tests.tiers").stderr


def test_a_test_that_is_named_runs_in_either_tier(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not long'\nmarkers =\n    quick\n    long\n")
    (tmp_path / "test_made.py").write_text(
        "import pytest\n@pytest.mark.quick('b')\n@pytest.mark.parametrize('x', ['a', 'b'])\ndef test_it(x): pass\n"
    )
    for arguments, count in (
        (["test_made.py"], 1),
        (["test_made.py::test_it[a]"], 1),
        (["test_made.py::test_it"], 2),
        (["test_made.py::test_it", "-m", "long"], 1),
        (["test_made.py::test_it", "test_made.py"], 1),
    ):
        done = test_parallel.run(tmp_path, "-p", "tests.tiers", *arguments)
        assert f"{count} passed" in done.stdout, done.stdout
