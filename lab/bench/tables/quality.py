"""Declares the tables of quality: of the configurations of the embedded model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lab.bench.harness.markdown import Columns, Result, Table, Text, estimate, interval

Rows = Iterable[Mapping[str, Any]]
_WAYS = ("ways",)
_KINDS = {"colour_held_out": "colour", "count_held_out": "count", "pair_held_out": "place"}
"""By group of prompts the attribute that its families are of."""


def _scores(result: Result) -> Rows:
    """Score and FID of every run, and whether the gates hold."""
    fid, score = result["lens"]["fid"], result["lens"]["score"]
    for name, run in result["ways"].items():
        changes = {f"{key}_change": [run["ratios"][lens][end] - 1 for end in ("value", "low", "high")]
                   for key, lens in (("score", score), ("fid", fid)) if lens in run["ratios"]}  # fmt: skip
        yield {
            "name": name, "told": run["told"], "score": run["scores"][score], "fid": run["scores"][fid], **changes,
            "gates": verdicts(result, name),
        }  # fmt: skip


def _scores_note(result: Result) -> str:
    return (
        f"{result['captions']} captions of unseen families; {result['lens']['fid']} and {result['lens']['score']}. "
        f"FID between two sets of true pictures of these captions: {result['halves_fid']:.4f}."
    )


def verdicts(result: Result, run: str) -> str | None:
    """The verdicts of a run's gates, of FID and of the score; None for fp32, which the gates compare with."""
    return ", ".join(gate["verdict"] for gate in result["ways"][run]["gates"]) or None


def _pair_columns(result: Result) -> Columns:
    names = dict.fromkeys(name for run in result["ways"].values() for name in run["pairs"])
    titles = {"psnr": "PSNR, dB", "ssim": "SSIM"}
    cells = [(titles.get(name, f"`{name}`"), estimate(f"pairs[{name}]", ".1f" if name == "psnr" else ".4f"))
             for name in names]  # fmt: skip
    return [("run", "`{name}`"), *cells]


def _composition(result: Result) -> Rows:
    """The table of what is right in each run, and what a run gains and loses against fp32 on the same prompts."""
    for name, run in result["ways"].items():
        groups, moved = run["composition"], run["right_less_base"]
        preferred = [groups[kind]["clip_prefers_caption"][0] for kind in _KINDS]
        yield {
            "name": name, **moved, "change": None if name == "fp32" else f"+{moved['gained']} -{moved['lost']}",
            "preferred": 100 * sum(preferred) / len(preferred),
            **{part: groups[kind].get(part) for kind, part in _KINDS.items()},
        }  # fmt: skip


def _diversity(result: Result) -> Rows:
    """The table of the difference between two seeds of a prompt, beside two true pictures."""
    for kind, both in result["two_seeds"].items():
        for label, pair in zip(("two seeds, both right", "two true pictures"), both, strict=True):
            if pair["pairs"]:
                yield {"prompts": kind.replace("_", " "), "label": label, **pair}


TABLES: dict[str, Table | Text] = {
    "ways": Table(_WAYS, (
        ("run", "`{name}`"), ("how", "{told}"), ("score", estimate("score", ".2f")),
        ("to fp32", "{score_change[0]:+.2%} ({score_change[1]:100*+.2f} to {score_change[2]:100*+.2f})"),
        ("FID", estimate("fid", ".4f")),
        ("to fp32", "{fid_change[0]:+.2%} ({fid_change[1]:100*+.2f} to {fid_change[2]:100*+.2f})"),
        ("gates: FID, score", "{gates}")),
        _scores, _scores_note),
    "ways-pairs": Table(_WAYS, _pair_columns, lambda result: (
        {"name": name, **run} for name, run in result["ways"].items() if run["pairs"])),
    "ways-composition": Table(_WAYS, (
        ("run", "`{name}`"), ("all right", "{right} of {of}"), ("to fp32", "{change}"),
        *((f"% {part}", interval(part, ".0f", "100*")) for part in _KINDS.values()),
        ("% emoji-clip prefers caption", "{preferred:.1f}")), _composition,
        "{judged} prompts, a third of each kind; 95% intervals."),
    "ways-diversity": Table(_WAYS, (
        ("prompts", "{prompts}"), ("pairs of", "{label}"), ("number", "{pairs}"),
        ("PSNR, dB", interval("psnr_db", ".1f")),
        ("% under 30 dB", interval("share_under_30_db", ".0f", "100*")), ("SSIM", interval("ssim", ".3f")),
        ("`emoji-clip-layers`", interval("emoji-clip-layers", ".2f"))), _diversity),
    "ways-shown": Text(_WAYS, lambda result: [f"{n}. {text}" for n, text in enumerate(result["shown"], 1)]),
}  # fmt: skip
