"""Fills docs/results.md with figures and tables of what was measured: `python -m benchmarks.figures`.

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
    return draw(lines, "Captions' score by DeepCache's interval", "interval", "emoji-clip score, % of fp32's")


def ladder(found: dict[str, Any]) -> list[str]:
    rows = ["| rung | pictures/s | speedup | FID | score | PSNR |", "|---|---|---|---|---|---|"]
    for rung in found["rungs"]:
        quality = rung["quality"]
        seen = "– | – | –" if quality is None else _seen(quality)
        rows.append(f"| {rung['name']} | {rung['images_per_s']:.2f} | {rung['speedup']:.2f}× | {seen} |")
    return rows


def quality(found: dict[str, Any]) -> list[str]:
    rows = ["| drawn as | FID | above fp32's | score | of fp32's | PSNR |", "|---|---|---|---|---|---|"]
    for name, one in found["variants"].items():
        more, ratio = one["fid_more"], one["clip_ratio"]
        psnr = one["psnr_db"]
        rows.append(
            f"| {name} | {one['fid'][0]:.5f} | {more[0]:+.5f} ({more[1]:+.5f} to {more[2]:+.5f}) "
            f"| {one['clip'][0]:.2f} | {ratio[0]:.2%} ({ratio[1]:.2%} to {ratio[2]:.2%}) "
            f"| {'–' if psnr is None or psnr > 90 else f'{psnr:.1f} dB'} |"
        )
    return [*rows, "", f"FID between the two halves of the real pictures: {found['halves_fid']:.5f}."]


def sweep(found: dict[str, Any]) -> list[str]:
    """Of few captions a FID says little, so there is none."""
    rows = [f"| {found['captions']} captions | score, of fp32's | PSNR |", "|---|---|---|"]
    for name, one in found["variants"].items():
        ratio, psnr = one["clip_ratio"], one["psnr_db"]
        seen = "–" if psnr is None or psnr > 90 else f"{psnr:.1f} dB"
        rows.append(f"| {name} | {ratio[0]:.2%} ({ratio[1]:.2%} to {ratio[2]:.2%}) | {seen} |")
    return rows


def arrivals(found: dict[str, Any]) -> list[str]:
    names = {
        "engine": "the engine", "window_free": "request-level, what waits", "window_3s": "request-level, 3 s window",
        "diffusers": "stock diffusers, what waits",
    }  # fmt: skip
    rows = [
        f"{found['rate_per_s']:.2f}/s, {found['precision']}, DeepCache {found['deepcache']}.", "",
        "| | mean | p50 | p99 | engine's p99 against it |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, label in names.items():
        if name in found:
            one = found[name]
            ratio = found["engine"]["p99_s"] / one["p99_s"]
            rows.append(
                f"| {label} | {one['mean_s']:.2f} s | {one['p50_s']:.2f} s | {one['p99_s']:.2f} s | {ratio:.2f}× |"
            )
    return [
        *rows, "",
        f"With a full queue the engine draws {found['saturated_per_s']:.2f}/s, {found['saturated_ratio']:.2f}× of full "
        f"static batches' {found['capacity_per_s']:.2f}/s; stock diffusers in such batches draws "
        f"{found['diffusers_capacity_per_s']:.2f}/s.",
    ]  # fmt: skip


def peers(found: dict[str, Any]) -> list[str]:
    rows = [f"| contender | {found['rows']} rows |", "|---|---|"]
    return rows + [f"| {name} | {ms:.1f} ms |" for name, ms in found["unet_ms"].items() if ms is not None]


def _seen(quality: dict[str, Any]) -> str:
    psnr = quality["psnr_db"]
    exact = psnr is None or psnr > 90
    return f"{quality['fid'][0]:.5f} | {quality['clip'][0]:.2f} | {'–' if exact else f'{psnr:.1f} dB'}"


TABLES = {"ladder": ladder, "quality": quality, "sweep": sweep, "arrivals": arrivals, "peers": peers}
SWEEP = QUALITY.with_name("sweep.json")


def fill(page: str, results: Path) -> str:
    """The page with each table between its two marks; a table whose result is not there stays as it is."""
    for name, table in TABLES.items():
        path = results / f"{name}.json"
        start, found, rest = page.partition(f"<!-- {name} -->\n")
        if path.is_file() and found:
            rows = "\n".join(table(json.loads(path.read_text("utf-8"))))
            _, end, after = rest.partition("<!-- end -->")
            page = f"{start}{found}{rows}\n{end}{after}"
    return page


def main() -> None:
    variants: dict[str, Any] = json.loads(SWEEP.read_text("utf-8"))["variants"]
    (_DOCS / "alpha.svg").write_text(alphas(variants), "utf-8")
    (_DOCS / "deepcache.svg").write_text(intervals(variants), "utf-8")
    page = _DOCS / "results.md"
    page.write_text(fill(page.read_text("utf-8"), QUALITY.parent), "utf-8")


if __name__ == "__main__":
    main()
