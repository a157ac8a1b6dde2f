"""Renders the tables of docs/ and README.md from results: of the CPU, of quality, and of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks import simulate

Result = dict[str, Any]
NONE = "–"
CLIP_GATE, CACHED_CLIP_GATE = 0.002, 0.005  # as in `diptych evaluate compare`: maximum change of the CLIP score

_OTHER_WAYS = {"plain": "plain", "searched": "searched", "fp8": "FP8"}  # of 8 bits, beside the recipe


class Table(NamedTuple):
    """Markdown rows of one or several results, named by their files under benchmarks/."""

    files: tuple[str, ...]
    rows: Callable[..., list[str]]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def gate(name: str, ratio: Sequence[float]) -> str:
    """The verdict of `diptych evaluate` on a variant's CLIP score relative to fp32, with its interval."""
    if name == "fp32":
        return NONE
    cached = any(word in name for word in ("block", "resnet", "auto", "half", "published"))
    allowed = CACHED_CLIP_GATE if cached else CLIP_GATE
    far = [abs(value - 1) for value in ratio]
    verdict = "holds" if max(far) <= allowed else "open" if far[0] <= allowed else "fails"
    return f"{verdict} ({allowed:.1%})"


def published(found: Result) -> list[str]:
    """The engine's plans and published helpers, one picture at a time."""
    rows = [
        (
            f"`{name}`", f"{one['operations']:.0%}", f"{1000 * one['seconds']:.0f} ms", f"{one['of_full']:.2f}",
            psnr(one["psnr_db"]), f"{one['ssim']:.3f}",
            f"{one['clip_ratio'][0]:.2%} ({one['clip_ratio'][1]:.2%} to {one['clip_ratio'][2]:.2%})",
        )
        for name, one in found["contenders"].items()
    ]  # fmt: skip
    header = (
        f"fp32, {found['captions']} captions", "FLOPs", "an image", "of its full plan", "PSNR", "SSIM", "CLIP score",
    )  # fmt: skip
    left_out = [f"Left out: `{name}` ({why})." for name, why in found["left_out"].items()]
    return [*markdown(header, rows), "", *([" ".join(left_out)] if left_out else [])]


def agreement(found: Result) -> list[str]:
    """This project's figures of images beside other implementations', and why where they differ."""
    rows = [
        (
            one["figure"],
            one["reference"],
            f"{one['ours']:.7g}",
            f"{one['theirs']:.7g}",
            f"{one['relative']:.0e}",
            one["reason"],
        )
        for one in found["rows"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    header = ("figure", "of", "ours", "theirs", "relative difference", "reason")
    return [*markdown(header, rows), "", f"{found['pictures']:,} pictures in each set; {versions}."]


def arrivals(found: Result) -> list[str]:
    names = {
        "engine": "step-level", "window_free": "request-level, no window",
        "window_3s": "request-level, 3 s window", "diffusers": "stock diffusers, no window",
    }  # fmt: skip
    engine = found["engine"]
    rows = [
        (
            label, *(f"{found[name][key]:.2f} s" for key in ("mean_s", "p50_s", "p99_s")),
            *(f"{engine[key] / found[name][key]:.2f}×" for key in ("p50_s", "p99_s")),
        )
        for name, label in names.items()
        if name in found
    ]  # fmt: skip
    said = (
        f"{found['arrivals']} Poisson arrivals at {found['rate_per_s']:.2f}/s, {found['load']:.0%} of the throughput "
        f"of full static batches; {found['model']}, {found['precision']}, DeepCache {found['deepcache'] or 'off'}. "
        f"With a full queue step-level batching reaches {found['saturated_per_s']:.2f}/s, "
        f"{found['saturated_ratio']:.2f}× the {found['capacity_per_s']:.2f}/s of full static batches; stock diffusers "
        f"reaches {found['diffusers_capacity_per_s']:.2f}/s in such batches."
    )
    header = ("batching", "mean", "p50", "p99", "step-level p50 / this p50", "step-level p99 / this p99")
    return [*markdown(header, rows), "", said]


def serve(found: Result) -> list[str]:
    def ms(*keys: str) -> list[str]:
        return [f"{1000 * found[key]:.0f} ms" if key else NONE for key in keys]

    rows = [
        ("latency of an image", f"{found['p50_s']:.2f} s", f"{found['p99_s']:.2f} s"),
        ("of it outside the engine", *ms("overhead_s", "overhead_p99_s")),
        ("`/healthz`", *ms("healthz_p50_s", "healthz_p99_s")),
        ("a rejected request", *ms("rejected_p50_s", "rejected_p99_s")),
        (f"creating a job, at {found['submitted_per_s']:.0f}/s", *ms("submit_p50_s", "submit_p99_s")),
        ("`/healthz` at that load", *ms("", "flood_healthz_p99_s")),
    ]
    said = (
        f"{found['arrivals']} Poisson arrivals at {found['rate_per_s']:.2f}/s, {found['load']:.0%} of the "
        f"{found['capacity_per_s']:.2f}/s of {found['clients']} closed-loop clients; throughput "
        f"{found['images_per_s']:.2f} images/s. {found['model']}, {found.get('precision', 'precision not recorded')}, "
        f"{found['steps']} steps."
    )
    return [*markdown(("through HTTP, Redis and Celery", "median", "p99"), rows), "", said]


def peers(found: Result) -> list[str]:
    few = found["unet_ms_2_rows"]
    rows = [
        (name, f"{ms:.1f} ms", f"{few[name]:.1f} ms" if name in few else NONE, f"{found['relative_error'][name]:.2%}")
        for name, ms in found["unet_ms"].items()
        if ms is not None
    ]
    left_out = [f"Left out: `{name}` ({why})." for name, why in found["left_out"].items()]
    said = f"Error: norm of the difference from diffusers' fp32, over that of its output. {found['forwards']} forwards."
    return [
        *markdown(("runtime", f"{found['rows']} rows", "2 rows", "error"), rows), "", " ".join([said, *left_out]),
    ]  # fmt: skip


def scheduling(found: Result) -> list[str]:
    rows = [
        (f"{int(waiting):,}", *(f"{one[key]:.3f} ms" for key in ("median_ms", "mean_ms", "p99_ms", "max_ms")))
        for waiting, one in found["waiting"].items()
    ]
    return markdown(("requests waiting", "median iteration", "mean", "p99", "longest"), rows)


def text(*found: Result) -> list[str]:
    names = {
        "transformers-generate": "transformers `generate`, one at a time",
        "transformers-static-batch": "transformers, padded batches of {static_batch}",
        "transformers-generate_batch": "transformers `generate_batch`",
        "diptych": "Diptych, fp32",
        "diptych-int8": "Diptych, INT8",
        "diptych-speculative": "Diptych, fp32, speculative decoding",
    }
    rows = [
        (label.format(**found[0]), *(_rate(one["tokens_per_s"].get(name)) for one in found))
        for name, label in names.items()
        if any(name in one["tokens_per_s"] for one in found)
    ]
    rows.append(("draft; acceptance rate", *(f"{one['draft']}; {one['acceptance']:.0%}" for one in found)))
    rows.append(("speedup of speculative decoding (computed)", *(_speculative(one["tokens_per_s"]) for one in found)))
    return markdown(("tokens/s", *(f"`{one['model']}`, {one['requests']} requests" for one in found)), rows)


def _speculative(rates: dict[str, float]) -> str:
    both = rates.get("diptych-speculative"), rates.get("diptych")
    return f"{both[0] / both[1]:.2f}×" if both[0] and both[1] else NONE


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def cohost(found: Result) -> list[str]:
    images, tokens, goal = found["images_per_s"], found["tokens_per_s"], found["objectives"]
    rows = [
        (
            "images/s", f"{images['alone']:.2f}", f"{images['together']:.2f}", f"{found['image_share']:.2f}",
            f"{found['image_p99_s']:.2f} s per image",
        ),
        (
            "tokens/s", f"{tokens['alone']:.0f}", f"{tokens['together']:.0f}", f"{found['text_share']:.2f}",
            f"{found['tpot_p99_s']:.2f} s per token",
        ),
    ]  # fmt: skip
    flying = found["in_flight"]
    said = (
        f"{found['model']}, {found['steps']} steps, {flying['image']} in flight, and "
        f"{found['text_model']}, {flying['text']} in flight. Target: {goal['tpot_s']:.2f} s per token (configured: "
        f"{goal['tpot_set_s']:.2f}; from the cost curves: {goal['tpot_free_s']:.2f}). The shares add up to "
        f"{found['sum']:.2f}; time slicing gives one, and more is noise of the machine."
    )
    return [*markdown(("", "alone", "together", "share", "p99 together"), rows), "", said]


def chaos(found: Result) -> list[str]:
    rows = [
        (
            f"`{one['name']}`", f"{one['runs']}", f"{one['jobs']:,}", f"{one['lost']}", f"{one['twice']}",
            NONE if one["recovery_s"] is None else f"{one['recovery_s']:.1f} s",
            ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in one["most"].items()) or NONE,
        )
        for one in found["scenarios"]
    ]  # fmt: skip
    header = ("scenario", "runs", "jobs", "lost", "finished twice", "longest recovery", "at most")
    said = (
        f"Lease {found['lease_s']:g} s, {found['workers']} workers. Recovery is the time from the fault until the last "
        "affected job continued."
    )
    return [*markdown(header, rows), "", said]


def neighbours(found: Result) -> list[str]:
    beside = {
        "alone": "alone", "burner": "a CPU-bound process", "peer": "a tenant with the same requests",
        "beside": "the worst-case tenant",
    }  # fmt: skip
    rows = []
    for name, said in beside.items():
        row = [said]
        for kind in ("picture", "text"):
            felt, alone = found[name][kind], found["alone"][kind]
            row += [f"{felt['p50_s']:.3f} s", f"{felt['p99_s']:.3f} s", f"{felt['p99_s'] / alone['p99_s']:.2f}"]
        rows.append((*row, f"{found[name]['failed']}"))
    header = ("next to", "image p50", "p99", "p99 / alone", "text p50", "p99", "p99 / alone", "failed")
    said = f"{found['alone']['picture']['requests']} images of 4 steps and as many texts of 16 tokens in each row."
    return [*markdown(header, rows), "", said]


def hostile(found: Result) -> list[str]:
    rows = [
        (kind, f"{sum(answers.values()):,}", ", ".join(f"{status}: {n:,}" for status, n in sorted(answers.items())))
        for kind, answers in sorted(found["statuses"].items())
    ]
    low, high = found["rss_mib"]
    said = (
        f"{found['requests']:,} bodies. `/healthz` meanwhile: median {found['healthz_p50_ms']:.1f} ms, p99 "
        f"{found['healthz_p99_ms']:.1f} ms, maximum {found['healthz_worst_ms']:.0f} ms. Resident memory of the API: "
        f"{low:.0f} MiB at the start, {high:.0f} MiB at the end."
    )
    return [*markdown(("defect", "bodies", "answers"), rows), "", said]


# -- the simulator -----------------------------------------------------------------------------------------------------


def simulated(*found: Result) -> list[str]:
    """p99 by load, one device; in brackets step-level batching's p99 as a fraction of it."""
    rows = []
    for one in found:
        for point in one["points"]:
            rows.append((_kind(one), f"{point['load']:g}", f"{point['rate_per_s']:.2f}", *_p99(one, point)))
    return markdown(("images", "load", "images/s", *_labels(found[0])), rows)


def fleet(*found: Result) -> list[str]:
    """p99 by number of devices and of jobs per worker."""
    rows = []
    for one in found:
        for point in one["points"]:
            rows.append(
                (
                    _kind(one), f"{point['gpus']:,}", f"{one['image_jobs']}", f"{point['rate_per_s']:,.2f}",
                    *_p99(one, point),
                )
            )  # fmt: skip
    return markdown(("images", "GPUs", "jobs per worker", "images/s", *_labels(found[0])), rows)


def saturated(found: Result) -> list[str]:
    """Throughput under overload."""
    point = max(found["points"], key=lambda point: float(point["load"]))
    rates = {name: one["throughput_per_s"] for name, one in point["policies"].items()}
    most = max(rate for name, rate in rates.items() if name != "step_level")
    labels = simulate.policies(found["window_s"])
    rows = [(label, f"{rates[name]:.2f}", f"{rates[name] / most:.3f}") for name, label in labels.items()]
    return markdown((f"at load {point['load']:g}", "images/s", "relative to full static batches"), rows)


def _labels(found: Result) -> list[str]:
    return list(simulate.policies(found["window_s"]).values())


def _p99(found: Result, point: Result) -> list[str]:
    policies = point["policies"]
    ours = policies["step_level"]["p99_s"]
    cells = [f"{ours:.2f}"]
    for name in simulate.policies(found["window_s"]):
        if name != "step_level":
            theirs = policies[name]["p99_s"]
            cells.append(f"{theirs:.2f} ({ours / theirs:.2f})")
    return cells


def _kind(found: Result) -> str:
    mix = found["mix"]
    steps, cached = "/".join(mix["steps"]), " or ".join(mix["deepcache"])
    burst = "" if found["bursts"] is None else ", in bursts"
    return f"{steps} steps, DeepCache {cached}{burst}"


def psnr(value: float | None) -> str:
    return NONE if value is None or value > 90 else f"{value:.1f} dB"


def layer_errors(found: Result) -> list[str]:
    """By type of layer the error of its output in each way, for inputs of no and of the heaviest tails."""
    least, *_, most = found["multiples"]
    columns = [
        (f"recipe, {multiple}×" if multiple != least else "recipe, Gaussian", f"recipe@{multiple}")
        for multiple in found["multiples"]
    ]
    columns += [(f"{told}, {most}×", f"{way}@{most}") for way, told in _OTHER_WAYS.items()]
    rows = [
        (f"`{kind}`" if " of " not in kind else kind, "no" if one["kept"] else "yes",
         *(f"{one[key]:.2%}" for _, key in columns))
        for kind, one in found["types"].items()
    ]  # fmt: skip
    return markdown(("layers", "in 8 bits", *(told for told, _ in columns)), rows)


def lora_load(found: Result) -> list[str]:
    """Steps of requests without a LoRA while one is read, beside those before."""
    kinds = ("median", "mean", "p95", "worst")
    rows = [
        (told, *(f"{found[f'{name}_{kind}_ms']:.1f}" for kind in kinds), str(found[f"{name}_steps"]))
        for name, told in (("plain", "without a load"), ("loading", "while it is read"))
    ]
    rows.append(("ratio", *(f"{found[f'{kind}_ratio']:.3f}" for kind in kinds), ""))
    return markdown(("a step, ms", *kinds, "steps"), rows)


def control(found: Result) -> list[str]:
    """A step whose rows all have a control network, beside the step and the network by themselves."""
    ms = [found[f"{kind}_ms"] for kind in ("plain", "control", "mixed")]
    ratio = "{:.2f} ({:.2f} to {:.2f})".format(found["ratio"], *found["spread"])
    rows = [(*(f"{one:.0f}" for one in ms), ratio)]
    said = (
        f"{found['model']} in {found['precision']}, its edge ControlNet in {found['control_precision']}, "
        f"{found['rows']} rows, {found['rounds']} turns."
    )
    header = ("step without, ms", "network alone, ms", "step with it, ms", "sum of the first two / the third, by turn")
    return [*markdown(header, rows), "", said]


TABLES = {
    "control": Table(("control",), control),
    "layer-errors": Table(("layer-errors",), layer_errors),
    "lora-load": Table(("lora-load",), lora_load),
    "published": Table(("published",), published),
    "agreement": Table(("agreement",), agreement),
    "arrivals": Table(("arrivals",), arrivals),
    "serve": Table(("serve",), serve),
    "peers": Table(("peers",), peers),
    "scheduling": Table(("scheduling",), scheduling),
    "text": Table(("text-emoji-lm", "text-llama-100m"), text),
    "cohost": Table(("cohost",), cohost),
    "chaos": Table(("chaos",), chaos),
    "neighbours": Table(("neighbours",), neighbours),
    "hostile": Table(("hostile",), hostile),
    "planning-h200": Table(("simulate-h200", "simulate-h200-deepcache"), simulated),
    "planning-cpu": Table(("simulate-cpu", "simulate-cpu-auto"), simulated),
    "planning-mixed": Table(("simulate-h200-mixed", "simulate-h200-bursts"), simulated),
    "planning-fleet": Table(
        ("simulate-fleet", "simulate-fleet-mixed", "simulate-fleet-mixed-4", "simulate-fleet-mixed-2"), fleet
    ),
    "planning-saturated": Table(("simulate-cpu-auto",), saturated),
}
