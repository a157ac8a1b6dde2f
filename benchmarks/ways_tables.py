"""Renders docs/quality.md's tables from `benchmarks.ways`: scores, pairs, composition and diversity of each way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import NONE, Result, Table, markdown

_OTHER_WORK = 3.0  # load average that two drawing threads alone do not reach
_KINDS = {"colour_held_out": "colour", "count_held_out": "count", "pair_held_out": "place"}
"""By group of prompts the attribute that its families are of."""


def scores(found: Result) -> list[str]:
    """Speed, score and FID of every way, and whether the gates hold."""
    fid, score = found["lens"]["fid"], found["lens"]["score"]
    base = found["ways"]["fp32"]["images_per_s"]
    rows = []
    for name, one in found["ways"].items():
        speed = one["images_per_s"] if one["load"] < _OTHER_WORK else None
        gates = [gate["verdict"] for gate in one["gates"]]
        rows.append(
            (
                f"`{name}`", one["told"], NONE if not speed else f"{speed:.2f}",
                NONE if not speed or not base else f"{speed / base:.2f}×", _interval(one["scores"][score], ".2f"),
                _change(one["ratios"].get(score)), _interval(one["scores"][fid], ".4f"),
                _change(one["ratios"].get(fid)), ", ".join(gates) or NONE,
            )
        )  # fmt: skip
    header = ("run", "how", "images/s", "speed", "score", "to fp32", "FID", "to fp32", "gates: FID, score")
    said = (
        f"{found['captions']} captions of unseen families; {fid} and {score}. FID between two sets of true pictures of "
        f"these captions: {found['halves_fid']:.4f}. {_loads(found)}"
    )
    return [*markdown(header, rows), "", said]


def score_ratio(found: Result, way: str) -> tuple[float, float, float] | None:
    """A way's score relative to fp32's, with its interval; None: it was not measured."""
    ratio = found["ways"].get(way, {}).get("ratios", {}).get(found["lens"]["score"])
    return None if ratio is None else (ratio["value"], ratio["low"], ratio["high"])


def _loads(found: Result) -> str:
    """How busy the machine was: speeds of a machine with other work compare badly, and are left out."""
    loads = [one["load"] for one in found["ways"].values()]
    said = f"Load average before each run, with the run before in it: {min(loads):.1f} to {max(loads):.1f}."
    return (
        said
        if max(loads) < _OTHER_WORK
        else f"{said} From {_OTHER_WORK:.1f} the speed is left out: there was other work."
    )


def pairs(found: Result) -> list[str]:
    """Distances to fp32's pictures of the same captions and noise."""
    names = list(dict.fromkeys(name for one in found["ways"].values() for name in one["pairs"]))
    rows = [
        (f"`{run}`", *(_interval(one["pairs"][name], ".1f" if name == "psnr" else ".4f") for name in names))
        for run, one in found["ways"].items()
        if one["pairs"]
    ]
    called = {"psnr": "PSNR, dB", "ssim": "SSIM"}
    return markdown(("run", *(called.get(name, f"`{name}`") for name in names)), rows)


def composition(found: Result) -> list[str]:
    """What is right in each way, and what another way than fp32 gains and loses of the same prompts."""
    rows = []
    for run, one in found["ways"].items():
        groups, moved = one["composition"], one["right_less_base"]
        total = f"{moved['right']} of {moved['of']}"
        change = NONE if run == "fp32" else f"+{moved['gained']} -{moved['lost']}"
        parts = [_share(groups[kind].get(part)) for kind, part in _KINDS.items()]
        preferred = [groups[kind]["clip_prefers_caption"][0] for kind in _KINDS]
        rows.append((f"`{run}`", total, change, *parts, f"{100 * sum(preferred) / len(preferred):.1f}"))
    header = ("run", "all right", "to fp32", *(f"% {part}" for part in _KINDS.values()), "% emoji-clip prefers caption")
    return [*markdown(header, rows), "", f"{found['judged']} prompts, a third of each kind; 95% intervals."]


def diversity(found: Result) -> list[str]:
    """How much two seeds of a prompt differ, beside two true pictures."""
    rows = []
    for kind, (seeds, true) in found["two_seeds"].items():
        for what, one in (("two seeds, both right", seeds), ("two true pictures", true)):
            if not one["pairs"]:
                continue
            rows.append(
                (
                    kind.replace("_", " "), what, str(one["pairs"]), _triple(one["psnr_db"], ".1f"),
                    _share(one["share_under_30_db"]), _triple(one["ssim"], ".3f"),
                    _triple(one["emoji-clip-layers"], ".2f"),
                )
            )  # fmt: skip
    header = ("prompts", "pairs of", "number", "PSNR, dB", "% under 30 dB", "SSIM", "`emoji-clip-layers`")
    return markdown(header, rows)


def shown(found: Result) -> list[str]:
    """The captions of the strip."""
    return [f"{number}. {text}" for number, text in enumerate(found["shown"], 1)]


def _interval(one: Mapping[str, float], form: str) -> str:
    return _triple((one["value"], one["low"], one["high"]), form)


def _triple(one: Any, form: str) -> str:
    value, low, high = (format(part, form) for part in one)
    return f"{value} ({low} to {high})"


def _change(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return NONE
    value, low, high = (100 * (ratio[end] - 1) for end in ("value", "low", "high"))
    return f"{value:+.2f}% ({low:+.2f} to {high:+.2f})"


def _share(one: Any) -> str:
    return NONE if one is None else _triple([100 * part for part in one], ".0f")


TABLES: dict[str, Table] = {
    "ways": Table(("ways",), scores),
    "ways-pairs": Table(("ways",), pairs),
    "ways-composition": Table(("ways",), composition),
    "ways-diversity": Table(("ways",), diversity),
    "ways-shown": Table(("ways",), shown),
}
