"""Declares the tables of docs/h200.md, and of the README's figures for one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.markdown import Result, Table, Text, cell, items, recorded
from benchmarks.quality_tables import score_ratio

Rows = Iterable[Mapping[str, Any]]
CLIP_GATE, CACHED_CLIP_GATE = 0.002, 0.005  # as in `diptych evaluate compare`: maximum change of the CLIP score
_KINDS = {"int8": "INT8", "fp8": "FP8 (E4M3)", "bf16": "bf16"}
_RUNGS = {  # label, and the run of `benchmarks.ways` that draws so
    "diffusers-1": ("diffusers bf16, one at a time", ""), "diffusers-8": ("diffusers bf16, batches of 8", ""),
    "bf16": ("bf16", ""), "int8": ("INT8", "int8"), "int8+deepcache-resnet": ('INT8, DeepCache "auto"', "int8-auto"),
    "int8+deepcache-half": ('INT8, DeepCache "half"', "int8-half"),
    "int8+deepcache-block": ('INT8, DeepCache "2" ("block")', "int8-block2"), "fp8": ("FP8", ""),
    "fp8+deepcache-half": ('FP8, DeepCache "half"', ""),
}  # fmt: skip
_PLANS = {
    "full": "20 steps with guidance",
    "half": '20 steps with guidance, DeepCache "half"',
    "gate": '"half", guidance until half of the steps',
    "gate+tiny": '"half", guidance until half of the steps, tiny decoder',
    "interval3": "20 steps with guidance, every third step deep",
    "interval3+gate": "every third step deep, guidance until half of the steps",
    "interval3+gate+tiny": "every third step deep, guidance until half of the steps, tiny decoder",
    "4-steps": "4 steps without guidance (LCM)",
    "4-steps+tiny": "4 steps without guidance (LCM), tiny decoder",
}
_GRAPHS = ("deep × 16", "deep × 8", "deep × 2", "shallow-resnet × 16", "shallow × 16", "vae × 1", "vae × 4")
_CLOCKS = "{sm_mhz:.0f} MHz, {power_w:.0f} W"


def gate(run: str, ratio: Sequence[float]) -> str:
    """The verdict of `diptych evaluate` on a run's CLIP score relative to fp32, with its interval."""
    cached = any(word in run for word in ("block", "resnet", "auto", "half", "published"))
    allowed = CACHED_CLIP_GATE if cached else CLIP_GATE
    far = [abs(value - 1) for value in ratio]
    verdict = "holds" if max(far) <= allowed else "open" if far[0] <= allowed else "fails"
    return f"{verdict} ({allowed:.1%})"


def _scored(scored: Result, rung: str) -> dict[str, Any]:
    """The score of a rung's run, and its gate."""
    run = _RUNGS[rung][1]
    ratio = score_ratio(scored, run)
    return {} if ratio is None else {"score": ratio[0], "gate": gate(run, ratio)}


def _engine(result: Result, scored: Result) -> Rows:
    stock = result["rungs"].get("diffusers-8", {}).get("images_s")
    for name, (label, _) in _RUNGS.items():
        if rung := result["rungs"].get(name):
            yield {**rung, "label": label, "ratio": stock and rung["images_s"] / stock, **_scored(scored, name)}


def _by_kind(result: Result, prefix: str, form: str) -> list[tuple[str, str]]:
    """A column of each precision whose results have this prefix."""
    return [(label, f"{{{kind}{form}}}") for kind, label in _KINDS.items() if f"{prefix} {kind}" in result]


def _phases(result: Result) -> Rows:
    kinds = [kind for kind in _KINDS if f"costs_ms {kind}" in result]
    for name in _GRAPHS:
        costs = {kind: cell("{ms:.1f}", {"ms": result[f"costs_ms {kind}"].get(name)}) for kind in kinds}
        if any(name in result[f"costs_ms {kind}"] for kind in kinds):
            yield {"name": name, **costs}
    ready = {kind: cell("{s:.1f} s", {"s": result.get(f"ready_s {kind}")}) for kind in kinds}
    yield {"name": "time until graphs were recorded", **ready}


def _plans(result: Result) -> Rows:
    half = result["rungs"].get("half", {}).get("images_s")
    for name, rung in result["rungs"].items():
        if windows := rung.get("windows"):
            rates = [window["images_s"] for window in windows]
            yield {
                **windows[-1], **rung, "p50_s": windows[-1]["p50_s"], "label": _PLANS.get(name, name),
                "low": min(rates), "high": max(rates), "ratio": half and rung["images_s"] / half,
                "deep_rows": _deep_rows(windows),
            }  # fmt: skip


def _deep_rows(windows: Sequence[Result]) -> float:
    """Mean rows of the deep forwards of all windows."""
    deep = [(int(phase.rpartition(" ")[2]), figures["count"]) for window in windows
            for phase, figures in window["phases"].items() if phase.startswith("deep ×")]  # fmt: skip
    return float(sum(rows * count for rows, count in deep) / sum(count for _, count in deep))


_RUNG_OF = {"full": "int8", "half": "half", "4-steps": "4-steps"}  # of `benchmarks.engine`, by plan of `fleet`


def _fleet(result: Result, engine: Result) -> Rows:
    """The plans, each with ever more GPUs, beside so many engines alone."""
    for plan, rung in _RUNG_OF.items():
        alone = engine["rungs"][rung]
        for count, plans in sorted(result["gpus"].items(), key=lambda item: int(item[0])):
            figures = plans[plan]
            single = {"one": figures.get("single_s"), "engine": alone["single_s"]}
            yield {
                **figures, **figures["cpu_s_an_image"], "plan": _PLANS[plan], "gpus": int(count),
                "share": figures["images_s"] / int(count) / alone["images_s"],
                "alone": cell("{one:.3f} s; {engine:.3f} s", single),
            }  # fmt: skip


def _text_load(result: Result) -> Rows:
    for name, load in result["loads"].items():
        yield {**load, "name": name}


def _before(result: Result) -> Rows:
    for name, ms in result["ms"].items():
        before = result["before_ms"].get(name)
        yield {"name": name, "ms": ms, "before": cell("{ms:.3f} ms", {"ms": before}),
               "ratio": cell("{ratio:.3f}", {"ratio": before and ms / before})}  # fmt: skip


TABLES: dict[str, Table | Text] = {
    "h200-engine": Table(("h200/engine", "ways"), (
        ("1024×1024, 20 steps with guidance", "{label}"), ("images/s", "{images_s:.2f}"),
        ("relative to diffusers, batches of 8", "{ratio:.2f}×"),
        ("CLIP score on emoji-xl, relative to fp32", "{score:.2%}"), ("gate", "{gate}"), ("SM clock, power", _CLOCKS)),
        _engine),
    "h200-phases": Table(("h200/engine",), lambda result: [
        ("ms per graph, phase × rows", "{name}"), *_by_kind(result, "costs_ms", "")], _phases),
    "h200-plans": Table(("h200/plans",), (
        ("INT8, 1024×1024", "{label}"), ("images/s, median", "{images_s:.2f}"), ("windows", "{low:.2f} to {high:.2f}"),
        ('relative to "half"', "{ratio:.2f}×"), ("one image alone", "{single_s:.3f} s"),
        ("rows of a deep forward, mean", "{deep_rows:.1f}"), ("in flight", "{in_flight}"),
        ("latency p50 of these", "{p50_s:.2f} s"), ("SM clock, power", _CLOCKS)), _plans),
    "h200-fleet": Table(("h200/fleet", "h200/fleet-engine"), (
        ("INT8, 1024×1024, JPEG", "{plan}"), ("GPUs", "{gpus}"), ("images/s", "{images_s:.2f}"),
        ("of so many engines alone", "{share:.1%}"), ("p50, p99", "{p50_s:.2f} s, {p99_s:.2f} s"),
        ("CPU per image: workers, APIs, Redis", "{workers:.3f} s, {apis:.3f} s, {redis:.4f} s"),
        ("one image alone: over HTTP; in the engine", "{alone}")), _fleet,
        "{apis} API processes, {cores} cores; windows of {window_s:.0f} s, each once."),
    "h200-text-load": Table(("h200/text-load",), (
        ("in flight × prompt/answer tokens", "{name}"), ("tokens/s", "{tokens_s:,.0f}"),
        ("a step", "{step_ms:.2f} ms"), ("first token p50, p99", "{first_p50_s:.3f} s, {first_p99_s:.3f} s"),
        ("requests", "{requests}")), _text_load, "{model} in {precision}, keys and values in {kv}."),
    "h200-text-load-server": Table(("h200/text-load-server",), (
        ("in flight × prompt/answer tokens @ arrivals", "{name}"), ("tokens/s", "{tokens_s:,.0f}"),
        ("first token p50, p99", "{first_p50_s:.3f} s, {first_p99_s:.3f} s"), ("later tokens p99", "{token_p99_ms} ms"),
        ("requests", "{requests}")), _text_load, "{model} in {precision}, keys and values in {kv}; random arrivals."),
    "h200-text-drafts": Table(("h200/text-drafts",), (
        ("draft, its acceptance assumed", "{draft}"), ("guesses a round", "{guesses}"), ("tokens/s", "{tokens_s:,.0f}"),
        ("tokens a round", "{tokens_a_round:.2f}"), ("a round", "{round_ms:.2f} ms"),
        ("the draft's graph", "{draft_ms:.2f} ms"), ("verification", "{verify_ms:.2f} ms")), items("drafts"),
        "{model} in {precision}, keys and values in floats, {load} tokens. Drafts have random weights: which of their "
        "guesses are right is assumed, not measured."),
    "h200-before": Table(("h200/phases",), (
        ("graph, phase and rows", "{name}"), ("now", "{ms:.3f} ms"), ("before", "{before}"), ("ratio", "{ratio}")),
        _before, "Before: {before}."),
    **{name: recorded(file, name) for file, names in {
        "history/numerics": ("h200-numerics",), "history/catalogue": ("h200-catalogue",),
        "history/cohost": ("h200-cohost",), "history/text": ("h200-text-steps",),
        "history/h200-control": ("h200-control",), "history/loras": ("h200-loras",),
        "history/threads": ("h200-threads",), "history/single": ("h200-single",),
        "history/emoji-xl": ("h200-fidelity",),
        "history/service": ("h200-starts", "h200-service"),
    }.items() for name in names},
}  # fmt: skip
