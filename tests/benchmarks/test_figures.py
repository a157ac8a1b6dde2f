"""docs/results.md is filled from results, and says what they say."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import figures
from benchmarks.ladder import QUALITY


def test_tables_go_between_their_marks_and_can_be_filled_again(tmp_path: Path) -> None:
    page = "before\n<!-- ladder -->\nold\n<!-- end -->\nbetween\n<!-- peers -->\n<!-- end -->\nafter\n"
    rung = {"name": "diffusers", "images_per_s": 1.234, "speedup": 1.0, "quality": None}
    (tmp_path / "ladder.json").write_text(json.dumps({"rungs": [rung]}), "utf-8")
    once = figures.fill(page, tmp_path)
    assert "| diffusers | 1.23 | 1.00× | – | – | – |" in once and "old" not in once
    assert once.startswith("before\n<!-- ladder -->\n") and once.endswith("<!-- peers -->\n<!-- end -->\nafter\n")
    assert figures.fill(once, tmp_path) == once


def test_the_page_and_its_figures_are_those_of_the_results() -> None:
    """Whoever measures anew must fill the page in, too."""
    docs = QUALITY.parents[2] / "docs"
    page = (docs / "results.md").read_text("utf-8")
    assert figures.fill(page, QUALITY.parent) == page
    variants = json.loads(figures.SWEEP.read_text("utf-8"))["variants"]
    assert (docs / "alpha.svg").read_text("utf-8") == figures.alphas(variants)
    assert (docs / "deepcache.svg").read_text("utf-8") == figures.intervals(variants)
