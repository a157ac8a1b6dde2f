"""Renders a run, or a comparison of runs, as one self-contained page: images, scores, gates, speed, worst cases.

The page is the template report.html beside this file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from evaluation import compare, pixels, plots
from evaluation.pixels import Pixels
from evaluation.run import EvaluationRun

_SIDE = 384  # no image is shown larger
_AMPLIFIED = 16
_SERIES = 6  # colours of the page


def page(result: Mapping[str, Any], runs: Sequence[EvaluationRun], *, count: int = 24) -> str:
    """The whole page. `runs` are those of `result`, in the same order; `count` captions are in the grid.

    Raises `pixels.PictureError`.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name("report.html").read_text("utf-8"))
    names = [run["name"] for run in result["runs"][1:]]
    return template.render(
        result,
        title=f"{result['base']} against {', '.join(names)}" if names else result["base"],
        amplified=_AMPLIFIED,
        figures=list(dict.fromkeys(name for run in result["runs"] for name in run["scores"])),
        paired=compare.paired_names(result),
        gates=list(filter(None, (_gate(result, name) for name in _told(result)))),
        speeds=list(filter(None, (_speed(result, name) for name in _told(result)))),
        differences=list(_differences(result, runs)),
        settings=_settings(result),
        names=[run.name for run in runs],
        grid=_grid(runs, count),
    )


def _told(result: Mapping[str, Any]) -> tuple[str, str]:
    return result["lens"]["fid"], result["lens"]["score"]


def _gate(result: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]] | None:
    """The ratios of one figure of all runs compared with the base."""
    bars = []
    for number, run in enumerate(result["runs"]):
        ratio = run.get("ratios", {}).get(name)
        if ratio is not None:
            gate: Mapping[str, Any] = next((gate for gate in run["gates"] if gate["figure"] == name), {})
            low_percent, high_percent = (
                None if gate.get(end) is None else 100 * (gate[end] - 1) for end in ("low", "high")
            )
            value, low, high = (100 * (ratio[key] - 1) for key in ("value", "low", "high"))
            verdict = gate.get("verdict", "")
            bars.append(
                plots.IntervalRow(run["name"], value, low, high, low_percent, high_percent, verdict, number % _SERIES)
            )
    return (name, plots.whiskers(bars)) if bars else None


def _speed(result: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str] | None:
    """The points of a figure over speed, and the name of the upward axis."""
    dots = [
        plots.Point(
            run["name"], run["pictures_per_second"], score["value"], score["low"], score["high"], number % _SERIES
        )
        for number, run in enumerate(result["runs"])
        if run["pictures_per_second"] is not None and (score := run["scores"].get(name)) is not None
    ]
    better = "lower is better" if name == result["lens"]["fid"] else "higher is better"
    return (plots.scatter(dots), f"{name}, {better}") if len(dots) > 1 else None


def _differences(result: Mapping[str, Any], runs: Sequence[EvaluationRun]) -> Iterator[dict[str, Any]]:
    """The section of each run that is paired with the base: the distribution of PSNR, its changes, and titled lists of
    cases.
    """
    for number, (entry, run) in enumerate(zip(result["runs"], runs, strict=True)):
        if every := entry.get("differences"):
            template = "{base:.4g} → {run:.4g} ({value:+.4g})"
            worst = {"lowest PSNR": [(case, f"{case['value']:.1f} dB") for case in entry["pairs"]["psnr"]["worst"]]}
            worst |= {
                f"{name} falls most": [(case, template.format(**case)) for case in change["worst"]]
                for name, change in entry["changes"].items()
            }
            yield {
                "name": entry["name"],
                "series": number % _SERIES,
                "plot": plots.histogram([psnr for _, psnr, _ in every]),
                "changes": entry["changes"],
                "worst": {title: [_case(runs[0], run, *case) for case in cases] for title, cases in worst.items()},
            }


def _case(base: EvaluationRun, run: EvaluationRun, case: Mapping[str, Any], template: str) -> dict[str, Any]:
    caption = next(caption for caption in run.captions if caption.id == case["id"])
    a, b = (_picture(each, caption.index) for each in (base, run))
    gap = np.clip(np.abs(a.astype(int) - b.astype(int)) * _AMPLIFIED, 0, 255).astype(np.uint8)
    return {"caption": caption, "images": [_embed(each) for each in (a, b, gap)], "told": template}


def _settings(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """The runs' request settings and generators, one column per run."""
    columns = [
        dict(run["settings"]) | {f"drawn by: {k}": v for k, v in run["drawn_by"].items()} for run in result["runs"]
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [_plain(column.get(name)) for column in columns] for name in names}


def _grid(runs: Sequence[EvaluationRun], limit: int) -> list[dict[str, Any]]:
    """Captions spread evenly over the list, with each run's image."""
    places = [{(c.id, c.text): c.index for c in run.captions} for run in runs]
    common = [key for key in places[0] if all(key in place for place in places)]
    count = min(limit, len(common))
    indices = [common[k * len(common) // count] for k in range(count)]
    return [
        {
            "caption": key[1],
            "images": [_embed(_picture(run, place[key])) for run, place in zip(runs, places, strict=True)],
        }
        for key in indices
    ]


def _picture(run: EvaluationRun, index: int) -> Pixels:
    return pixels.read(run.pictures / run.records[index].file)


def _embed(picture: Pixels) -> str:
    image = Image.fromarray(picture)
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "WEBP", lossless=max(image.size) <= 160, quality=90)
    return "data:image/webp;base64," + base64.b64encode(stream.getvalue()).decode()


def _plain(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 48 else text[:20] + "…" + text[-12:]
