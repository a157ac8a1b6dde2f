"""Declares the tables of docs/ and README.md that are measured on a CPU: of speed, and of the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lab.bench.harness.markdown import Columns, Result, Table, Text, cell

Rows = Iterable[Mapping[str, Any]]
_GATES_OF = {
    "+int8": ("int8", ""), "+deepcache": ("int8-auto", ""), "+plan": ("int8-balanced", ""),
    "+tiny": ("int8-tiny", "the decoder alone: "), "turbo": ("turbo", ""),
    "turbo+tiny": ("turbo", "the full decoder: "),
}  # fmt: skip
"""By rung of the ladder the run of `lab.bench.ways` whose gates it has."""
_RIVALS = {
    "diffusers": "diffusers", "openvino-genai": "OpenVINO GenAI, INT8", "optimum-intel": "optimum-intel, INT8",
    "+int8": "**Diptych**, INT8", "+deepcache": "**Diptych**, INT8, DeepCache `auto`",
}  # fmt: skip
_BATCHING = {
    "engine": "step-level", "window_free": "request-level, no window", "window_3s": "request-level, 3 s window",
}  # fmt: skip
_TEXT = {
    "transformers-generate": "transformers `generate`, one at a time",
    "transformers-static-batch": "transformers, padded batches of {static_batch}",
    "transformers-generate_batch": "transformers `generate_batch`", "diptych": "Diptych, fp32",
    "diptych-int8": "Diptych, INT8", "diptych-speculative": "Diptych, fp32, speculative decoding",
    "diptych-user": "Diptych, fp32, one user's chats in turn",
    "diptych-user-speculative": "Diptych, fp32, these with speculative decoding",
}  # fmt: skip
_NEIGHBOURS = {
    "alone": "alone", "burner": "a CPU-bound process", "peer": "a tenant with the same requests",
    "beside": "the worst-case tenant",
}  # fmt: skip
_SERVE = (  # first column, and the keys of median and p99, in seconds or milliseconds
    ("latency of an image", "p50_s", "p99_s", ".2f", "s"),
    ("of it outside the engine", "overhead_s", "overhead_p99_s", "1000*.0f", "ms"),
    ("`/healthz`", "healthz_p50_s", "healthz_p99_s", "1000*.0f", "ms"),
    ("a rejected request", "rejected_p50_s", "rejected_p99_s", "1000*.0f", "ms"),
    ("creating a job, at {submitted_per_s:.0f}/s", "submit_p50_s", "submit_p99_s", "1000*.0f", "ms"),
    ("`/healthz` at that load", "", "flood_healthz_p99_s", "1000*.0f", "ms"),
)


# -- speed -------------------------------------------------------------------------------------------------------------


def _ladder_columns(native: Result, avx2: Result, _: Result) -> Columns:
    speeds = [
        pair
        for runs, result in (("native", native), ("avx2", avx2)) if result
        for pair in (
            (f"images/s, {result['capability']}",
             f"{{{runs}[images_per_s]:.2f}} ({{{runs}[spread][0]:.2f}} to {{{runs}[spread][1]:.2f}})"),
            ("speedup", f"{{{runs}[speedup]:.2f}}×"),
        )
    ]  # fmt: skip
    return [("configuration", "`{name}`"), *speeds, ("gates: FID, score", "{gates}")]


def _ladder_rows(native: Result, avx2: Result, scored: Result) -> Rows:
    slower = {rung["name"]: rung for rung in avx2.get("rungs", [])}
    for rung in native["rungs"]:
        name = rung["name"]
        yield {"name": name, "native": rung, "avx2": slower.get(name), "gates": _gates(name, scored)}


def _gates(rung: str, scored: Result) -> str | None:
    """The verdicts of a rung's run; fp32 is what the gates compare with."""
    run, prefix = _GATES_OF.get(rung, ("", ""))
    if not run or not scored:
        return "not measured" if rung in ("+gate", "fast+tiny") and scored else None
    return prefix + ", ".join(gate["verdict"] for gate in scored["ways"][run]["gates"])


def _ladder_note(native: Result, avx2: Result, _: Result) -> str:
    best = " ".join(
        f"{result['capability']}: {_stock(result['stock'])}." for result in (native, avx2) if result.get("stock")
    )
    return f"Median turn (slowest to fastest). `diffusers` is the stock pipeline at its best. {best}"


def _stock(stock: Mapping[str, Any]) -> str:
    """The stock pipeline's variant, in words, and why it is not compiled."""
    trials = [trial for trial in stock["trials"] if "left_out" in trial and trial["variant"]["compile"]]
    left_out = [trial["left_out"] for trial in trials if trial.get("processes", 1) == 1]
    return _variant(stock["best"], stock["processes"]) + (f" (not compiled: {'; '.join(left_out)})" if left_out else "")


_OPTIONS = {
    "channels_last": "channels_last", "compile": "torch.compile", "int8_decoder": "decoder in INT8",
    "static": "static shapes", "pinned": "pinned threads",
}  # fmt: skip


def _variant(variant: Mapping[str, Any], processes: int) -> str:
    batch, threads = variant["batch"], f"{variant['threads']} thread{'s' * (variant['threads'] > 1)}"
    parts = [
        f"{processes} processes, {threads} each" if processes > 1 else f"one process, {threads}",
        f"batches of {batch}" if batch > 1 else "single images", "bf16" if variant["bf16"] else "fp32",
        *(label for name, label in _OPTIONS.items() if variant.get(name)),
        *([f"hint {variant['hint']}"] if variant.get("hint") else []),
    ]  # fmt: skip
    return ", ".join(parts)


def _rival_rows(result: Result) -> Rows:
    return ({**row, "label": _RIVALS.get(row["name"], row["name"])} for row in result["rivals"])


def _rivals(result: Result, scored: Result) -> Rows:
    runs = result.get("scored", {}).get("runs", {})
    for row in _rival_rows(result):
        gates = [gate["verdict"] for gate in runs.get(row["name"], {}).get("gates", [])]
        yield {**row, "gates": ", ".join(gates) or _gates(row["name"], scored)}


def _rivals_note(result: Result, _: Result) -> str:
    """What was fastest of each, for many in flight and for one alone."""
    others = [row for row in result["rivals"] if "best" in row]
    fastest = [
        f"{_RIVALS[row['name']]}: {_variant(row['best'], row['processes'])}; alone {_variant(row['best_alone'], 1)}."
        for row in others
    ]
    versions = {name: version for row in others for name, version in row.get("versions", {}).items()}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{result['model']}, {result['steps']} steps; medians of {result['turns']} turns (slowest to fastest). "
        f"{' '.join(fastest)}" + (f" OpenVINO's environment: {named}." if named else "")
    )


def _plans(result: Result) -> Rows:
    """The plans of a model's INT8 variant that `diptych tune` stored, the full one first."""
    tuned = result["tuned"]["int8"]
    for plan in reversed(tuned["front"]):
        names = ", ".join(f"`{name}`" for name, fields in tuned["plans"].items() if fields == plan["fields"])
        extra = {"change": [ratio - 1 for ratio in plan["score_ratio"]]} if plan["speedup"] != 1 else {"psnr": None}
        yield {**plan, "names": names, **extra}


def _cascade(result: Result) -> Rows:
    """The gate that `diptych tune --cascade` stored for the model's student in INT8, beside others, and each alone."""
    tuned = result["tuned"]["int8"]["cascades"]["emoji-xl-turbo"]
    score = f"{tuned['lens']}-score"

    def row(label: str, figures: Mapping[str, Any]) -> Mapping[str, Any]:
        split = figures.get("random", {}).get(score)
        change = [ratio - 1 for ratio in figures["ratios"][score]]
        return {"kept": None, "gate": None, **figures, "label": label, "change": change,
                "split": None if split is None else split - 1}  # fmt: skip

    yield row(f"plan `{tuned['redraw']}` alone", tuned["alone"]["redrawn"])
    yield row("draft alone", tuned["alone"]["draft"])
    yield from (row("cascade", figures) for figures in tuned["frontier"])
    yield row("**tuned gate**, over the other half", tuned["checked"])


def _cascade_note(result: Result) -> str:
    tuned = result["tuned"]["int8"]["cascades"]["emoji-xl-turbo"]
    full, redrawn, draft, score = (1000 * tuned["device_s"][name] for name in ("full", "redrawn", "draft", "score"))
    return (
        f"{tuned['prompts']} captions; CPU milliseconds of an image: full plan {full:.0f}, "
        f"`{tuned['redraw']}` {redrawn:.0f}, draft {draft:.0f}, its score {score:.0f}."
    )


def _text_columns(*results: Result) -> Columns:
    def load(result: Result) -> str:
        return "one user" if "diptych-user" in result["tokens_per_s"] else f"{result['requests']} requests"

    return [("tokens/s", "{label}"), *(
        (f"`{result['model']}`, {load(result)}", f"{{cells[{number}]}}")
        for number, result in enumerate(filter(None, results))
    )]  # fmt: skip


def _text_rows(*results: Result) -> Rows:
    results = tuple(filter(None, results))
    rates = [result["tokens_per_s"] for result in results]
    for name, label in _TEXT.items():
        if any(name in each for each in rates):
            cells = [cell("{rate:,.0f}", {"rate": each.get(name)}) for each in rates]
            yield {"label": label.format(**results[0]), "cells": cells}
    cells = [f"{result['draft']}; {result['acceptance']:.0%}" for result in results]
    yield {"label": "draft; acceptance rate", "cells": cells}
    pairs = [("diptych", "diptych-user")["diptych-user" in each] for each in rates]
    gains = [each.get(f"{name}-speculative", 0) / each.get(name, 1) for name, each in zip(pairs, rates, strict=True)]
    cells = [cell("{gain:.2f}×", {"gain": gain or None}) for gain in gains]
    yield {"label": "speedup of speculative decoding (computed)", "cells": cells}


def _arrivals(result: Result) -> Rows:
    engine = result["engine"]
    for name, label in _BATCHING.items():
        if name in result:
            ratios = {f"{key}_ratio": engine[f"{key}_s"] / result[name][f"{key}_s"] for key in ("p50", "p99")}
            yield {"label": label, **result[name], **ratios}


def _serve(result: Result) -> Rows:
    for label, median, p99, form, unit in _SERVE:
        cells = [cell(f"{{{key}:{form}}} {unit}", result) if key else None for key in (median, p99)]
        yield {"label": cell(label, result), "median": cells[0], "p99": cells[1]}


def _cohost(result: Result) -> Rows:
    for label, rates, share, form, latency in (
        ("images/s", "images_per_s", "image_share", ".2f", "{image_p99_s:.2f} s per image"),
        ("tokens/s", "tokens_per_s", "text_share", ".0f", "{tpot_p99_s:.2f} s per token"),
    ):
        alone, together = (format(result[rates][kind], form) for kind in ("alone", "together"))
        yield {"label": label, "alone": alone, "together": together, "share": result[share],
               "latency": cell(latency, result)}  # fmt: skip


def _neighbours(result: Result) -> Rows:
    for name, label in _NEIGHBOURS.items():
        ratios = {f"{kind}_ratio": result[name][kind]["p99_s"] / result["alone"][kind]["p99_s"]
                  for kind in ("picture", "text")}  # fmt: skip
        yield {"label": label, **result[name], **ratios}


def _hostile(result: Result) -> list[str]:
    statuses = sum((Counter(answers) for answers in result["statuses"].values()), Counter())
    answers = ", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items()))
    return [cell(
        "{requests:,} bodies with {defects} kinds of defects; answers: {answers}. `/healthz` meanwhile: "
        "median {healthz_p50_ms:.1f} ms, p99 {healthz_p99_ms:.1f} ms, maximum {healthz_worst_ms:.0f} ms. Resident "
        "memory of the API: {rss_mib[0]:.0f} MiB at the start, {rss_mib[1]:.0f} MiB at the end.",
        {**result, "defects": len(result["statuses"]), "answers": answers},
    )]  # fmt: skip


# -- the simulator -----------------------------------------------------------------------------------------------------


def _simulated(*results: Result) -> Rows:
    """Every point of the results, with the figures of the scheduler."""
    for result in results:
        mix, bursts = result["mix"], "" if result["bursts"] is None else ", in bursts"
        kind = f"{'/'.join(mix['steps'])} steps, DeepCache {' or '.join(mix['deepcache'])}{bursts}"
        for point in result["points"]:
            yield {"kind": kind, "image_jobs": result["image_jobs"], **point, **point["policies"]["step_level"]}


_SIMULATED = (("p50", "{p50_s:.2f} s"), ("p99", "{p99_s:.2f} s"), ("busy", "{utilisation:.0%}"))

TABLES: dict[str, Table | Text] = {
    "ladder": Table(("ladder", "ladder-avx2", "ways"), _ladder_columns, _ladder_rows, _ladder_note),
    "rivals-short": Table(("rivals",), (
        ("", "{label}"), ("images/s, {in_flight} in flight", "{images_per_s:.2f}"),
        ("of the best other", "{ratio:.2f}×"),
        ("one alone, p50", "{alone_p50_s:.2f} s"), ("of the best other", "{alone_ratio:.2f}×")), _rival_rows,
        "{model}, {steps} steps, on a CPU; the engine alone, without HTTP; medians of {turns} turns."),
    "rivals": Table(("rivals", "ways"), (
        ("", "{label}"), ("images/s, {in_flight} in flight", "{images_per_s:.2f} ({spread[0]:.2f} to {spread[1]:.2f})"),
        ("of the best other", "{ratio:.2f}×"), ("p50", "{p50_s:.2f} s"), ("one alone, p50", "{alone_p50_s:.3f} s"),
        ("of the best other", "{alone_ratio:.2f}×"), ("gates: FID, score", "{gates}")), _rivals, _rivals_note),
    "plans": Table(("models/emoji-xl/plans",), (
        ("plan", "`{name}`"), ("names", "{names}"), ("images/s", "{images_per_s:.2f}"), ("speed", "{speedup:.2f}×"),
        ("PSNR", "{psnr:.1f} dB"), ("score", "{change[0]:+.2%} ({change[1]:100*+.2f} to {change[2]:100*+.2f})")),
        _plans),
    "cascade": Table(("models/emoji-xl/plans",), (
        ("", "{label}"), ("gate", "{gate:.2f}"), ("kept", "{kept:.0%}"), ("images per device second", "{speedup:.2f}×"),
        ("score", "{change[0]:+.2%} ({change[1]:100*+.2f} to {change[2]:100*+.2f})"), ("random split", "{split:+.2%}")),
        _cascade, _cascade_note),
    "arrivals": Table(("arrivals",), (
        ("batching", "{label}"), ("mean", "{mean_s:.2f} s"), ("p50", "{p50_s:.2f} s"), ("p99", "{p99_s:.2f} s"),
        ("step-level p50 / this p50", "{p50_ratio:.2f}×"), ("step-level p99 / this p99", "{p99_ratio:.2f}×")),
        _arrivals,
        lambda result: cell(
            "{arrivals} Poisson arrivals at {rate_per_s:.2f}/s, {load:.0%} of the throughput of full static batches; "
            "{model}, {precision}, DeepCache {cached}. With a full queue step-level batching reaches "
            "{saturated_per_s:.2f}/s, {saturated_ratio:.2f}× the {capacity_per_s:.2f}/s of full static batches.",
            {**result, "cached": result["deepcache"] or "off"})),
    "serve": Table(("serve",), (
        ("through HTTP, Redis and Celery", "{label}"), ("median", "{median}"), ("p99", "{p99}")), _serve,
        lambda result: cell(
            "{arrivals} Poisson arrivals at {rate_per_s:.2f}/s, {load:.0%} of the {capacity_per_s:.2f}/s of {clients} "
            "closed-loop clients; throughput {images_per_s:.2f} images/s. {model}, {precision}, {steps} steps.",
            {"precision": "precision not recorded", **result})),
    "scheduling": Table(("scheduling",), (
        ("requests waiting", "{waiting:,}"), ("median iteration", "{median_ms:.3f} ms"), ("mean", "{mean_ms:.3f} ms"),
        ("p99", "{p99_ms:.3f} ms"), ("longest", "{max_ms:.3f} ms")),
        lambda result: ({**figures, "waiting": int(waiting)} for waiting, figures in result["waiting"].items())),
    "text": Table(("text-emoji-lm", "text-llama-100m"), _text_columns, _text_rows),
    "cohost": Table(("cohost",), (
        ("", "{label}"), ("alone", "{alone}"), ("together", "{together}"), ("share", "{share:.2f}"),
        ("p99 together", "{latency}")), _cohost,
        "{model}, {steps} steps, {in_flight[image]} in flight, and {text_model}, {in_flight[text]} in flight. Target: "
        "{objectives[tpot_s]:.2f} s per token (configured: {objectives[tpot_set_s]:.2f}; from the cost curves: "
        "{objectives[tpot_free_s]:.2f}). The shares add up to {sum:.2f}; time slicing gives one, and more is noise of "
        "the machine."),
    "neighbours": Table(("neighbours",), (
        ("next to", "{label}"), *((title, f"{{{kind}{form}")
            for kind, name in (("picture", "image"), ("text", "text")) for title, form in (
                (f"{name} p50", "[p50_s]:.3f} s"), ("p99", "[p99_s]:.3f} s"), ("p99 / alone", "_ratio:.2f}"))),
        ("failed", "{failed}")), _neighbours,
        "{alone[picture][requests]} images of 4 steps and as many texts of 16 tokens in each row."),
    "hostile": Text(("hostile",), _hostile),
    "planning-load": Table(("simulate-h200", "simulate-h200-bursts"), (
        ("images", "{kind}"), ("load", "{load:g}"), ("images/s", "{rate_per_s:.2f}"), *_SIMULATED), _simulated),
    "planning-fleet": Table(("simulate-fleet", "simulate-fleet-jobs"), (
        ("GPUs", "{gpus:,}"), ("jobs per worker", "{image_jobs}"), ("images/s", "{rate_per_s:,.2f}"), *_SIMULATED),
        _simulated),
}  # fmt: skip
