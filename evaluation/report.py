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


def page(found: Mapping[str, Any], runs: Sequence[EvaluationRun], *, shown: int = 24) -> str:
    """The whole page. `runs` are those of `found`, in the same order; `shown` captions are in the grid.

    Raises `pixels.PictureError`.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(Path(__file__).with_name("report.html").read_text("utf-8"))
    others = [run["name"] for run in found["runs"][1:]]
    return template.render(
        found,
        title=f"{found['base']} against {', '.join(others)}" if others else found["base"],
        amplified=_AMPLIFIED,
        figures=list(dict.fromkeys(name for run in found["runs"] for name in run["scores"])),
        paired=compare.paired_names(found),
        gates=list(filter(None, (_gate(found, name) for name in _told(found)))),
        speeds=list(filter(None, (_speed(found, name) for name in _told(found)))),
        differences=list(_differences(found, runs)),
        settings=_settings(found),
        names=[run.name for run in runs],
        grid=_grid(runs, shown),
    )


def _told(found: Mapping[str, Any]) -> tuple[str, str]:
    return found["lens"]["fid"], found["lens"]["score"]


def _gate(found: Mapping[str, Any], name: str) -> tuple[str, plots.Plot] | None:
    """The ratios of one figure of all runs compared with the base."""
    bars = []
    for number, run in enumerate(found["runs"]):
        ratio = run.get("ratios", {}).get(name)
        if ratio is not None:
            gate: Mapping[str, Any] = next((gate for gate in run["gates"] if gate["figure"] == name), {})
            least, most = (None if gate.get(end) is None else 100 * (gate[end] - 1) for end in ("low", "high"))
            value, low, high = (100 * (ratio[key] - 1) for key in ("value", "low", "high"))
            verdict = gate.get("verdict", "")
            bars.append(plots.Bar(run["name"], value, low, high, least, most, verdict, number % _SERIES))
    return (name, plots.whiskers(bars, "% from the base run")) if bars else None


def _speed(found: Mapping[str, Any], name: str) -> plots.Plot | None:
    dots = [
        plots.Point(run["name"], run["pictures_per_second"], one["value"], one["low"], one["high"], number % _SERIES)
        for number, run in enumerate(found["runs"])
        if run["pictures_per_second"] is not None and (one := run["scores"].get(name)) is not None
    ]
    better = "lower is better" if name == found["lens"]["fid"] else "higher is better"
    across = "images per second, while the engine was full"
    return plots.scatter(dots, across, f"{name}, {better}") if len(dots) > 1 else None


def _differences(found: Mapping[str, Any], runs: Sequence[EvaluationRun]) -> Iterator[dict[str, Any]]:
    """Of each run that is paired with the base: the distribution of PSNR, its changes, and titled lists of cases."""
    for number, (entry, run) in enumerate(zip(found["runs"], runs, strict=True)):
        if every := entry.get("differences"):
            told = "{base:.4g} → {run:.4g} ({value:+.4g})"
            worst = {"lowest PSNR": [(one, f"{one['value']:.1f} dB") for one in entry["pairs"]["psnr"]["worst"]]}
            worst |= {
                f"{name} falls most": [(one, told.format(**one)) for one in change["worst"]]
                for name, change in entry["changes"].items()
            }
            yield {
                "name": entry["name"],
                "series": number % _SERIES,
                "plot": plots.histogram([psnr for _, psnr, _ in every], "PSNR of a picture, dB", number % _SERIES),
                "changes": entry["changes"],
                "worst": {title: [_case(runs[0], run, *case) for case in cases] for title, cases in worst.items()},
            }


def _case(base: EvaluationRun, run: EvaluationRun, one: Mapping[str, Any], told: str) -> dict[str, Any]:
    caption = next(caption for caption in run.captions if caption.id == one["id"])
    a, b = (_picture(each, caption.index) for each in (base, run))
    gap = np.clip(np.abs(a.astype(int) - b.astype(int)) * _AMPLIFIED, 0, 255).astype(np.uint8)
    return {"caption": caption, "images": [_embed(each) for each in (a, b, gap)], "told": told}


def _settings(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """The runs' request settings and generators, one column per run."""
    columns = [
        dict(run["settings"]) | {f"drawn by: {k}": v for k, v in run["drawn_by"].items()} for run in found["runs"]
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [_plain(column.get(name)) for column in columns] for name in names}


def _grid(runs: Sequence[EvaluationRun], shown: int) -> list[dict[str, Any]]:
    """Captions spread evenly over the list, with each run's image."""
    places = [{(c.id, c.text): c.index for c in run.captions} for run in runs]
    common = [key for key in places[0] if all(key in place for place in places)]
    count = min(shown, len(common))
    picked = [common[k * len(common) // count] for k in range(count)]
    return [
        {
            "caption": key[1],
            "images": [_embed(_picture(run, place[key])) for run, place in zip(runs, places, strict=True)],
        }
        for key in picked
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
