"""Renders the plots in docs/ from results."""

from __future__ import annotations

from typing import Any

from benchmarks.simulation.plot import Line, draw

_ALPHAS = {0.0: "int8-plain", 0.3: "int8-alpha0.3", 0.5: "int8-alpha0.5", 0.65: "int8-alpha0.65", 0.8: "int8"}
_INTERVALS = (2, 3, 5)


def alphas(result: dict[str, Any]) -> str:
    """Quality of INT8 by SmoothQuant's alpha, with plain INT8 as a horizontal line."""
    variants = result["variants"]
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
        "PSNR, dB (median image)",
    )


def intervals(result: dict[str, Any]) -> str:
    """CLIP score by DeepCache interval, for each caching method."""
    variants = result["variants"]
    kinds = {
        "fp32, block": "fp32-block{}",
        "fp32, resnet": "fp32-resnet{}",
        "DeepCache package": "published-{}",
        "INT8, block": "int8-block{}",
        "INT8, resnet": "int8-resnet{}",
    }
    lines = []
    for number, (label, name) in enumerate(kinds.items()):
        series = number % 3  # INT8's two lines have the colours of fp32's
        start = variants["int8" if label.startswith("INT8") else "fp32"]
        dots = [(1.0, 100 * start["clip_ratio"][0])]
        dots += [(float(n), 100 * variants[name.format(n)]["clip_ratio"][0]) for n in _INTERVALS]
        lines.append(Line(label, dots, series, dashed=not label.startswith("fp32")))
    return draw(lines, "CLIP score by DeepCache interval", "interval", "emoji-clip score, % of fp32's")
