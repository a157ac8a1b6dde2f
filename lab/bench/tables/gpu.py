"""Declares the tables of docs/h200.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lab.bench.harness.markdown import Result, Table, Text, cell
from lab.bench.tables.quality import verdicts

Rows = Iterable[Mapping[str, Any]]
_RUNGS = {  # label, and the run of `lab.bench.ways` that draws so
    "bf16": ("bf16", ""),
    "fp8": ("FP8", ""),
    "fp8+half": ('FP8, DeepCache "half"', ""),
    "int8": ("INT8", "int8"),
    "auto": ('INT8, DeepCache "auto"', "int8-auto"),
    "half": ('INT8, DeepCache "half"', "int8-half"),
    "gate": ('"half", guidance until half of the steps', ""),
    "interval3+gate+tiny": ("every third step deep, guidance until half of the steps, tiny decoder", ""),
    "4-steps": ("4 steps without guidance (LCM)", ""),
    "4-steps+tiny": ("4 steps without guidance (LCM), tiny decoder", ""),
}
_COMPILED = {"eager": "eager", "compiled": "torch.compile", "autotuned": "torch.compile, autotuned"}
_PHASES = {
    "deep": "deep step", "shallow-resnet": 'shallow step, DeepCache "auto" and "half"',
    "shallow": 'shallow step, DeepCache "2" ("block")', "vae": "VAE", "text": "text encoders",
    "keys": "keys and values of the prompt",
}  # fmt: skip
_ROWS = (16, 8, 4, 2, 1)
_FASTEST_SHARE = 1.01  # a percent is noise
_PLANS = {  # label, and the rung of `lab.bench.engine`, by plan of `lab.bench.fleet`
    "full": ("20 steps with guidance", "int8"),
    "half": ('20 steps with guidance, DeepCache "half"', "half"),
    "4-steps": ("4 steps without guidance (LCM)", "4-steps"),
}


def _engine(result: Result, stock: Result, scored: Result) -> Rows:
    """diffusers, then the rungs, with the score and the gates of the embedded model drawn so."""
    rows = stock.get("rows", [])
    best = max((row["images_s"] for row in rows), default=None)
    single = {row["name"]: 1 / row["images_s"] for row in rows if row["batch"] == 1}
    for row in rows:
        if row["batch"] > 1:
            label = f"diffusers, bf16, {_COMPILED[row['name']]}, batches of {row['batch']}"
            yield {**row, "label": label, "ratio": row["images_s"] / best, "single_s": single.get(row["name"])}
    for name, (label, run) in _RUNGS.items():
        if rung := result["rungs"].get(name):
            quality = {}
            if run and scored:
                ratio = scored["ways"][run]["ratios"][scored["lens"]["score"]]["value"]
                quality = {"score": ratio, "gates": verdicts(scored, run)}
            ratio = None if best is None or name.startswith("4-steps") else rung["images_s"] / best  # others draw 20
            yield {**rung, "label": label, "ratio": ratio, **quality}


def _phases(result: Result) -> Rows:
    for phase, label in _PHASES.items():
        yield {"label": label, **{f"rows_{rows}": result["ms"].get(f"{phase} {rows}") for rows in _ROWS}}


def _fleet(result: Result, beside: Result, engine: Result) -> Rows:
    """The plans, each with ever more GPUs, beside so many engines alone: as fast as the engine was in any of its runs.

    Raises `ValueError` for a service that is faster than its engines: the baseline is wrong then.
    """
    measured = sorted(result["gpus"].items(), key=lambda item: int(item[0]))
    for plan in dict.fromkeys((*_PLANS, *(plan for _, plans in measured for plan in plans))):
        label, rung = _PLANS.get(plan, (plan, plan))
        runs: list[Result] = [run["rungs"][rung] for run in (beside, engine) if rung in run.get("rungs", {})]
        alone: Result = max(runs, key=lambda run: float(run["images_s"]), default={})
        for count, plans in measured:
            if (figures := plans.get(plan)) is None:
                continue
            single = {"one": figures.get("single_s"), "engine": alone.get("single_s")}
            share = figures["images_s"] / int(count) / alone["images_s"] if alone else None
            if share is not None and share > _FASTEST_SHARE:
                raise ValueError(f"{label}: {count} GPUs reach {share:.1%} of so many engines; measure it again")
            yield {
                **figures, **figures["cpu_s_an_image"], "plan": label, "gpus": int(count), "share": share,
                "alone": cell("{one:.3f} s; {engine:.3f} s", single),
            }  # fmt: skip


def _text_load(result: Result) -> Rows:
    for name, load in result["loads"].items():
        yield {**load, "name": name}


TABLES: dict[str, Table | Text] = {
    "h200-engine": Table(("h200/engine", "h200/stock", "ways"), (
        ("1024×1024, 20 steps with guidance", "{label}"), ("images/s", "{images_s:.2f}"),
        ("relative to the best of diffusers", "{ratio:.2f}×"), ("one image alone", "{single_s:.3f} s"),
        ("in flight", "{in_flight}"), ("latency p50 of these", "{p50_s:.2f} s"),
        ("score on emoji-xl, relative to fp32", "{score:.2%}"), ("gates: FID, score", "{gates}"),
        ("SM clock, power", "{sm_mhz:.0f} MHz, {power_w:.0f} W")), _engine),
    "h200-phases": Table(("h200/phases",), (
        ("ms of a CUDA graph, INT8, by rows", "{label}"), *((f"{rows}", f"{{rows_{rows}:.2f}}") for rows in _ROWS)),
        _phases),
    "h200-fleet": Table(("h200/fleet", "h200/fleet-engine", "h200/engine"), (
        ("INT8, 1024×1024, JPEG", "{plan}"), ("GPUs", "{gpus}"), ("images/s", "{images_s:.2f}"),
        ("of so many engines alone", "{share:.1%}"), ("p50, p99", "{p50_s:.2f} s, {p99_s:.2f} s"),
        ("CPU per image: workers, APIs, Redis", "{workers:.3f} s, {apis:.3f} s, {redis:.4f} s"),
        ("one image alone: over HTTP; in the engine", "{alone}")), _fleet,
        lambda fleet, *_: cell("{apis} API processes, {cores} cores; windows of {window_s:.0f} s, each once.", fleet)),
    "h200-text-load": Table(("h200/text-load",), (
        ("in flight × prompt/answer tokens", "{name}"), ("tokens/s", "{tokens_s:,.0f}"),
        ("a step", "{step_ms:.2f} ms"), ("first token p50, p99", "{first_p50_s:.3f} s, {first_p99_s:.3f} s"),
        ("requests", "{requests}")), _text_load, "{model} in {precision}, keys and values in {kv}."),
    "h200-text-load-server": Table(("h200/text-load-server",), (
        ("in flight × prompt/answer tokens @ arrivals", "{name}"), ("tokens/s", "{tokens_s:,.0f}"),
        ("first token p50, p99", "{first_p50_s:.3f} s, {first_p99_s:.3f} s"), ("later tokens p99", "{token_p99_ms} ms"),
        ("requests", "{requests}")), _text_load, "{model} in {precision}, keys and values in {kv}; random arrivals."),
}  # fmt: skip
