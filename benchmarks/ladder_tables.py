"""Renders the tables of the ladder and of a model's tuned plans, with the gates of quality beside the speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import NONE, Result, Table, markdown

_GATES_OF = {
    "+int8": ("int8", ""), "+deepcache": ("int8-auto", ""), "+plan": ("int8-balanced", ""),
    "+tiny": ("int8-tiny", "the decoder alone: "), "turbo": ("turbo", ""),
    "turbo+tiny": ("turbo", "the full decoder: "),
}  # fmt: skip
"""By rung the way to draw of `benchmarks.ways` whose gates it has."""
_SHORT = ("diffusers", "step-batching", "+int8", "+deepcache", "+plan")


def ladder(found: Result, avx2: Result, scored: Result, only: Sequence[str] | None = None) -> list[str]:
    """The rungs on both instruction sets, relative to the stock pipeline at its best, with the gates of quality."""
    slower = {rung["name"]: rung for rung in avx2["rungs"]}
    rows = []
    for rung in found["rungs"]:
        if only is not None and rung["name"] not in only:
            continue
        cells: list[str] = []
        for one in (rung, slower.get(rung["name"])):
            cells += [NONE] * 2 if one is None else [
                "{:.2f} ({:.2f} to {:.2f})".format(one["images_per_s"], *one["spread"]), f"{one['speedup']:.2f}×",
            ]  # fmt: skip
        rows.append((f"`{rung['name']}`", *cells, _gates(rung["name"], scored)))
    header = (
        "configuration", *(part for one in (found, avx2) for part in (f"images/s, {one['capability']}", "speedup")),
        "gates: FID, score",
    )  # fmt: skip
    best = " ".join(f"{one['capability']}: {_stock(one['stock'])}." for one in (found, avx2))
    said = f"Median turn (slowest to fastest). `diffusers` is the stock pipeline at its best. {best}"
    return [*markdown(header, rows), "", said]


def ladder_short(found: Result, avx2: Result, scored: Result) -> list[str]:
    """The rungs that a first page shows."""
    return ladder(found, avx2, scored, _SHORT)


def _gates(rung: str, scored: Result) -> str:
    """The verdicts of a rung's way to draw; fp32 is what the gates compare with."""
    way, said = _GATES_OF.get(rung, ("", ""))
    if not way:
        return "not measured" if rung in ("+gate", "fast+tiny") else NONE
    return said + ", ".join(gate["verdict"] for gate in scored["ways"][way]["gates"])


def _stock(stock: Mapping[str, Any]) -> str:
    """The stock pipeline's variant, in words."""
    best, processes = stock["best"], stock["processes"]
    parts = [
        f"{processes} processes" if processes > 1 else "one process", f"{best['threads']} threads each",
        f"batches of {best['batch']}", "bf16" if best["bf16"] else "fp32",
        *(["channels_last"] if best["channels_last"] else []), *(["torch.compile"] if best["compile"] else []),
    ]  # fmt: skip
    left_out = [one["left_out"] for one in stock["trials"] if "left_out" in one]
    return ", ".join(parts) + (f" (not compiled: {'; '.join(left_out)})" if left_out else "")


def plans(found: Result) -> list[str]:
    """The plans of a model's INT8 variant that `diptych tune` stored, the full one first."""
    tuned = found["tuned"]["int8"]
    rows = []
    for one in reversed(tuned["front"]):
        names = ", ".join(f"`{name}`" for name, fields in tuned["plans"].items() if fields == one["fields"])
        value, low, high = (100 * (ratio - 1) for ratio in one["score_ratio"])
        beside = (f"{one['psnr']:.1f} dB", f"{value:+.2f}% ({low:+.2f} to {high:+.2f})")
        rows.append(
            (
                f"`{one['name']}`", names, f"{one['images_per_s']:.2f}", f"{one['speedup']:.2f}×",
                *(beside if one["speedup"] != 1 else (NONE, NONE)),
            )
        )  # fmt: skip
    return markdown(("plan", "names", "images/s", "speed", "PSNR", "score"), rows)


TABLES = {
    "ladder": Table(("ladder", "ladder-avx2", "ways"), ladder),
    "ladder-short": Table(("ladder", "ladder-avx2", "ways"), ladder_short),
    "plans": Table(("models/emoji-xl/plans",), plans),
}
