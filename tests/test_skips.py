"""The summary of what was not run: by what is missing, of all processes, beside failures in full."""

from __future__ import annotations

from pathlib import Path

from tests import skips
from tests.test_parallel import run


def test_what_was_not_run_is_counted_by_what_is_missing_and_failures_are_shown(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.tiers import pytest_collection_modifyitems\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -rfExX -m 'not long'\nmarkers =\n    long: long\n")
    for name, reason in (("a", "needs a GPU"), ("b", "there is no CUDA device"), ("c", "the moon is full")):
        (tmp_path / f"test_{name}.py").write_text(
            f"import pytest\n@pytest.mark.parametrize('k', range(4))\ndef test_skipped(k): pytest.skip({reason!r})\n"
            "@pytest.mark.long\ndef test_long(): pass\n"
        )
    (tmp_path / "test_d.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    (tmp_path / "test_e.py").write_text("def test_fails(): assert 'what it says' == ''\n")
    done = run(tmp_path, "-p", "tests.skips", "--processes", "2", ".")
    failures, _, summary = done.stdout.partition(" not run -")
    assert done.returncode == 1 and "assert 'what it says' == ''" in failures
    assert [line.split(maxsplit=1) for line in summary.splitlines()[1:6]] == [
        ["8", "a GPU: `make test-gpu` on a machine with one"],
        ["4", "the moon is full"],
        ["1", "a package: `make .venv/.installed`"],
        ["3", "long tests and further cases: `make test-long`"],
        [*summary.splitlines()[5].split(maxsplit=1)],
    ]
    assert "SKIPPED" not in done.stdout and "FAILED test_e.py::test_fails" in done.stdout


def test_it_is_of_few_lines() -> None:
    lines = skips.summary([f"reason {n}" for n in range(40) for _ in range(n)], 7)
    assert len(lines) == skips.MOST + 1
    assert sum(int(line.split()[0]) for line in lines) == sum(range(40)) + 7
    assert skips.summary([], 0) == []
