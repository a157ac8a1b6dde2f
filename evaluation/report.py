"""Renders a run, or a comparison of runs, as one self-contained page: images, scores, gates, speed, worst cases.

The page's frame, style and script are report.html beside this file.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from evaluation import compare, pixels, plots
from evaluation.captions import Caption
from evaluation.pixels import Pixels
from evaluation.run import EvaluationRun

_FRAME = Path(__file__).with_name("report.html")
_SIDE = 384  # no image is shown larger
_AMPLIFIED = 16
_SERIES = 6  # colours of the page


def page(found: Mapping[str, Any], runs: Sequence[EvaluationRun], *, shown: int = 24) -> str:
    """The whole page. `runs` are those of `found`, in the same order; `shown` captions are in the grid.

    Raises `pixels.PictureError`.
    """
    parts = {
        "title": escape(_title(found)),
        "lead": _lead(found),
        "scores": _scores(found),
        "gates": _gates(found),
        "speed": _speed(found),
        "differences": _differences(found, runs),
        "settings": _settings(found),
        "names": json.dumps([run.name for run in runs]).replace("<", "\\u003c"),
        "grid": json.dumps(_grid(found, runs, shown)).replace("<", "\\u003c"),
    }
    whole = _FRAME.read_text("utf-8")
    for name, value in parts.items():
        whole = whole.replace(f"<!--{name}-->", value).replace(f'"{name}-here"', value)
    return whole


def _title(found: Mapping[str, Any]) -> str:
    others = [run["name"] for run in found["runs"][1:]]
    return f"{found['base']} against {', '.join(others)}" if others else str(found["base"])


def _lead(found: Mapping[str, Any]) -> str:
    real, lens = found["real"], found["lens"]
    against = "no real pictures were given" if real is None else f"FID from <b>{escape(real['name'])}</b>"
    paired = "paired " if len(found["runs"]) > 1 else ""
    text = (
        f"<b>{found['captions']}</b> captions · {against} · seen through <b>{escape(lens['name'])}</b> "
        f"({lens['features']} features) · 95% intervals of {found['resamples']} {paired}resamples of the captions"
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in found["notes"])
    return f"<p>{text}</p>" + (f'<ul class="notes">{notes}</ul>' if notes else "")


def _scores(found: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(name for run in found["runs"] for name in run["scores"]))
    paired = compare.paired_names(found)
    compared = len(found["runs"]) > 1
    heads = [
        *names,
        *("psnr, dB" if name == "psnr" else name for name in paired),
        "images/s",
        *(("gates",) if compared else ()),
    ]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    rows = []
    for number, run in enumerate(found["runs"]):
        cells = _figures(run, names, paired)
        if compared:
            cells.append(_verdicts(run) or ("–" if number else "base"))
        rows.append(
            f'<tr><th scope="row"><i class="dot b{number % _SERIES}"></i>{escape(run["name"])}</th>'
            f"{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    return f"<table><thead><tr><th>run</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _figures(run: Mapping[str, Any], names: Sequence[str], paired: Sequence[str]) -> list[str]:
    """The cells of a run's scores, of its pairs with the base run, and of its speed."""
    pairs = run.get("pairs", {})
    speed = run["pictures_per_second"]
    return [
        *(_score(run, name) for name in names),
        *(_figure(pairs.get(name)) for name in paired),
        "–" if speed is None else f"{speed:.2f}",
    ]


def _score(run: Mapping[str, Any], name: str) -> str:
    """A run's score, and by how much it differs from the base run's."""
    ratio = run.get("ratios", {}).get(name)
    moved = "" if ratio is None else f'<span class="moved">{100 * (ratio["value"] - 1):+.2f}%</span>'
    return _figure(run["scores"].get(name)) + moved


def _verdicts(run: Mapping[str, Any]) -> str:
    return "".join(
        f'<span class="chip {gate["verdict"]}" title="{escape(gate["figure"])}">{gate["verdict"]}</span>'
        for gate in run.get("gates", [])
    )


def _figure(one: Mapping[str, float] | None) -> str:
    if one is None:
        return "–"
    return f'{one["value"]:.4g}<span class="range">{one["low"]:.4g} … {one["high"]:.4g}</span>'


def _gates(found: Mapping[str, Any]) -> str:
    """One plot each for FID and the caption score, of all runs compared with the base."""
    parts = []
    for name in (found["lens"]["fid"], found["lens"]["score"]):
        bars = []
        for number, run in enumerate(found["runs"]):
            ratio = run.get("ratios", {}).get(name)
            if ratio is None:
                continue
            gate = next((gate for gate in run["gates"] if gate["figure"] == name), None)
            least = None if gate is None or gate["low"] is None else _percent(gate["low"])
            most = None if gate is None else _percent(gate["high"])
            value, low, high = (_percent(ratio[key]) for key in ("value", "low", "high"))
            verdict = "" if gate is None else gate["verdict"]
            bars.append(plots.Bar(run["name"], value, low, high, least, most, verdict, number % _SERIES))
        if bars:
            plot = plots.whiskers(bars, "% from the base run")
            parts.append(f"<figure><figcaption>{escape(name)}</figcaption>{plot}</figure>")
    if not parts:
        return ""
    spread = found["seed_spread"]
    said = (
        ""
        if spread is None
        else f"<p>FIDs of runs that differ in their seeds alone ({escape(', '.join(spread['runs']))}) are "
        f"{100 * spread['fid']:.2f}% apart: FID may rise by that where it is more than the gate.</p>"
    )
    return f'<section><h2>Gates</h2>{said}<div class="plots">{"".join(parts)}</div></section>'


def _speed(found: Mapping[str, Any]) -> str:
    fid, score = found["lens"]["fid"], found["lens"]["score"]
    parts = []
    for name in (fid, score):
        dots = [
            plots.Point(
                run["name"], run["pictures_per_second"], one["value"], one["low"], one["high"], number % _SERIES
            )
            for number, run in enumerate(found["runs"])
            if run["pictures_per_second"] is not None and (one := run["scores"].get(name)) is not None
        ]
        if len(dots) > 1:
            better = "lower is better" if name == fid else "higher is better"
            plot = plots.scatter(dots, "images per second, while the engine was full", f"{name}, {better}")
            parts.append(f"<figure>{plot}</figure>")
    if not parts:
        return ""
    return f'<section><h2>Speed against quality</h2><div class="plots">{"".join(parts)}</div></section>'


def _differences(found: Mapping[str, Any], runs: Sequence[EvaluationRun]) -> str:
    parts = []
    for number, (entry, run) in enumerate(zip(found["runs"], runs, strict=True)):
        every = entry.get("differences")
        if not every:
            continue
        plot = plots.histogram([psnr for _, psnr, _ in every], "PSNR of a picture, dB", number % _SERIES)
        cases = "".join(
            f'<h4>{escape(title)}</h4><div class="worst">{_cases(runs[0], run, worst)}</div>'
            for title, worst in _worst(entry)
        )
        parts.append(
            f'<article><h3><i class="dot b{number % _SERIES}"></i>{escape(entry["name"])}</h3>{_changes(entry)}'
            f'<div class="spread"><figure>{plot}</figure><div>{cases}</div></div></article>'
        )
    if not parts:
        return ""
    return (
        f"<section><h2>Paired tests</h2><p>How far each run's pictures are from {escape(found['base'])}'s of the same "
        "captions and seeds: the mean change of each caption's score, below 0 where the run is worse, and the "
        f"worst pictures: base, run, {_AMPLIFIED} times the difference.</p>{''.join(parts)}</section>"
    )


def _changes(entry: Mapping[str, Any]) -> str:
    """The mean change of each score, and whether the captions tell it from none."""
    rows = []
    for name, one in entry["changes"].items():
        told = "no change is told" if one["low"] <= 0 <= one["high"] else "lower" if one["high"] < 0 else "higher"
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td>{one["value"]:+.4g}'
            f'<span class="range">{one["low"]:+.4g} … {one["high"]:+.4g}</span></td><td>{told}</td></tr>'
        )
    head = "<thead><tr><th>score</th><th>mean difference</th><th></th></tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _worst(entry: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Titled lists of cases: the lowest PSNRs, and for each score the captions that lose most."""
    found = [("lowest PSNR", [one | {"told": f"{one['value']:.1f} dB"} for one in entry["pairs"]["psnr"]["worst"]])]
    for name, change in entry["changes"].items():
        told = "{base:.4g} → {run:.4g} ({value:+.4g})"
        found.append((f"{name} falls most", [one | {"told": told.format(**one)} for one in change["worst"]]))
    return found


def _cases(base: EvaluationRun, run: EvaluationRun, worst: Sequence[Mapping[str, Any]]) -> str:
    places = {caption.id: caption for caption in run.captions}
    return "".join(_case(base, run, places[one["id"]], one["told"]) for one in worst)


def _case(base: EvaluationRun, run: EvaluationRun, caption: Caption, told: str) -> str:
    a, b = (_picture(one, caption.index) for one in (base, run))
    gap = np.clip(np.abs(a.astype(int) - b.astype(int)) * _AMPLIFIED, 0, 255).astype(np.uint8)
    images = "".join(f'<img src="{_embed(one)}" alt="">' for one in (a, b, gap))
    return (
        f'<figure class="case">{images}<figcaption>{escape(caption.text)}<br>'
        f"<small>{escape(caption.id)} · {told}</small></figcaption></figure>"
    )


def _settings(found: Mapping[str, Any]) -> str:
    """The runs' request settings and generators, one column per run; differing rows are highlighted."""
    columns = [
        dict(run["settings"]) | {f"drawn by: {k}": v for k, v in run["drawn_by"].items()} for run in found["runs"]
    ]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        differs = ' class="differs"' if any(value != values[0] for value in values) else ""
        cells = "".join(f"<td>{escape(_plain(value))}</td>" for value in values)
        rows.append(f'<tr{differs}><th scope="row">{escape(name)}</th>{cells}</tr>')
    head = "".join(f"<th>{escape(run['name'])}</th>" for run in found["runs"])
    scored = " · ".join(f"{escape(k)} {escape(str(v))}" for k, v in found["environment"].items())
    return (
        f'<table class="settings"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        f'<p class="scored">scored with {scored}</p>'
    )


def _grid(found: Mapping[str, Any], runs: Sequence[EvaluationRun], shown: int) -> list[dict[str, Any]]:
    """Captions spread evenly over the list, with each run's image."""
    places = [{(c.id, c.text): c.index for c in run.captions} for run in runs]
    wanted = [key for key in places[0] if all(key in place for place in places)]
    count = min(shown, len(wanted))
    picked = [wanted[k * len(wanted) // count] for k in range(count)]
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


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def _plain(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 48 else text[:20] + "…" + text[-12:]
