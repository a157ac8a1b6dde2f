"""Draws the figures of docs/results.md from what was measured: `python -m benchmarks.figures`.

Knows the results' files; measures nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.ladder import QUALITY
from benchmarks.simulation.plot import Line, draw

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_ALPHAS = {0.0: "int8-plain", 0.3: "int8-alpha0.3", 0.5: "int8-alpha0.5", 0.65: "int8-alpha0.65", 0.8: "int8"}
_INTERVALS = (2, 3, 5)


def alphas(variants: dict[str, Any]) -> str:
    """Quality of INT8 by SmoothQuant's alpha; plain INT8 stands at the left as a line."""
    found = {alpha: variants[name] for alpha, name in _ALPHAS.items() if name in variants}
    plain = found.pop(0.0)["psnr_db"]
    ends = (min(found), max(found))
    return draw(
        [
            Line("SmoothQuant", [(alpha, one["psnr_db"]) for alpha, one in sorted(found.items())], 0),
            Line("plain INT8", [(end, plain) for end in ends], 1, dashed=True),
        ],
        "INT8 against fp32, by SmoothQuant's alpha",
        "alpha",
        "PSNR, dB (median picture)",
    )


def intervals(variants: dict[str, Any]) -> str:
    """The captions' score against the share of steps that are deep, for each way of caching."""
    kinds = {
        "fp32, block": "fp32-block{}",
        "fp32, resnet": "fp32-resnet{}",
        "DeepCache package": "published-{}",
        "INT8, block": "int8-alpha0.5-block{}",
    }
    lines = []
    for series, (label, name) in enumerate(kinds.items()):
        start = variants["int8-alpha0.5" if label.startswith("INT8") else "fp32"]
        dots = [(1.0, 100 * start["clip_ratio"][0])]
        dots += [(float(n), 100 * variants[name.format(n)]["clip_ratio"][0]) for n in _INTERVALS]
        lines.append(Line(label, dots, series, dashed=label.startswith("DeepCache")))
    return draw(lines, "Captions' score by DeepCache's interval", "interval", "emoji-clip score, % of fp32's")


def main() -> None:
    variants: dict[str, Any] = json.loads(QUALITY.read_text("utf-8"))["variants"]
    (_DOCS / "alpha.svg").write_text(alphas(variants), "utf-8")
    (_DOCS / "deepcache.svg").write_text(intervals(variants), "utf-8")


if __name__ == "__main__":
    main()
