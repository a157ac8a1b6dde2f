"""Renders the tables of docs/h200.md, and of the README's figures for one GPU, from results."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tables import NONE, Result, Table, control, gate, markdown
from benchmarks.ways_tables import score_ratio

_DRAWN_AS = {
    "int8": "int8",
    "int8+deepcache-resnet": "int8-auto",
    "int8+deepcache-half": "int8-half",
    "int8+deepcache-block": "int8-block2",
}
_RUNGS = {
    "diffusers-1": "diffusers bf16, one at a time",
    "diffusers-8": "diffusers bf16, batches of 8",
    "bf16": "bf16",
    "int8": "INT8",
    "int8+deepcache-resnet": 'INT8, DeepCache "auto"',
    "int8+deepcache-half": 'INT8, DeepCache "half"',
    "int8+deepcache-block": 'INT8, DeepCache "2" ("block")',
    "fp8": "FP8",
    "fp8+deepcache-half": 'FP8, DeepCache "half"',
}
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
_SERVED_WITH = {"off": "INT8", "auto": 'INT8, DeepCache "auto"', "2": 'INT8, DeepCache "2" ("block")'}
_SCORED = {"off": "int8", "auto": "int8-auto", "2": "int8-block2"}  # by DeepCache plan
_KINDS = {"int8": "INT8", "fp8": "FP8 (E4M3)", "bf16": "bf16"}


def engine(found: Result, scored: Result) -> list[str]:
    """Throughput of the configurations; for INT8 also the embedded model's CLIP score and gate."""
    rungs = found["rungs"]
    stock = rungs.get("diffusers-8", {}).get("images_s")
    rows = []
    for name, label in _RUNGS.items():
        if name not in rungs:
            continue
        one = rungs[name]
        ratio = score_ratio(scored, _DRAWN_AS.get(name, ""))
        rows.append(
            (
                label, f"{one['images_s']:.2f}", f"{one['images_s'] / stock:.2f}×" if stock else NONE,
                f"{ratio[0]:.2%}" if ratio else NONE, gate(_DRAWN_AS[name], ratio) if ratio else NONE,
                f"{one['sm_mhz']:.0f} MHz, {one['power_w']:.0f} W" if "sm_mhz" in one else NONE,
            )
        )  # fmt: skip
    header = (
        "1024×1024, 20 steps with guidance", "images/s", "relative to diffusers, batches of 8",
        "CLIP score on emoji-xl, relative to fp32", "gate", "SM clock, power",
    )  # fmt: skip
    return markdown(header, rows)


def phases(found: Result) -> list[str]:
    """Milliseconds of a recorded graph, by phase and rows."""
    kinds = [kind for kind in _KINDS if f"costs_ms {kind}" in found]
    wanted = ("deep × 16", "deep × 8", "deep × 2", "shallow-resnet × 16", "shallow × 16", "vae × 1", "vae × 4")
    rows = [
        (name, *(_ms(found[f"costs_ms {kind}"].get(name)) for kind in kinds))
        for name in wanted
        if any(name in found[f"costs_ms {kind}"] for kind in kinds)
    ]
    ready = [found.get(f"ready_s {kind}") for kind in kinds]
    rows.append(("time until graphs were recorded", *(NONE if s is None else f"{s:.1f} s" for s in ready)))
    return markdown(("ms per graph, phase × rows", *(_KINDS[kind] for kind in kinds)), rows)


def plans(found: Result) -> list[str]:
    """Throughput and the latency of a single image by plan."""
    half = found["rungs"].get("half", {}).get("images_s")
    rows = []
    for name, one in found["rungs"].items():
        windows = one.get("windows")
        if not windows:
            continue
        rates = [each["images_s"] for each in windows]
        rows.append(
            (
                _PLANS.get(name, name), f"{one['images_s']:.2f}", f"{min(rates):.2f} to {max(rates):.2f}",
                f"{one['images_s'] / half:.2f}×" if half else NONE, f"{one['single_s']:.3f} s",
                f"{_deep_rows(windows):.1f}", str(one["in_flight"]), f"{windows[-1]['p50_s']:.2f} s",
                f"{windows[-1]['sm_mhz']:.0f} MHz, {windows[-1]['power_w']:.0f} W" if "sm_mhz" in windows[-1] else NONE,
            )
        )  # fmt: skip
    header = (
        "INT8, 1024×1024", "images/s, median", "windows", 'relative to "half"', "one image alone",
        "rows of a deep forward, mean", "in flight", "latency p50 of these", "SM clock, power",
    )  # fmt: skip
    return markdown(header, rows)


def _deep_rows(windows: Sequence[Result]) -> float:
    """Mean rows of the deep forwards of all windows."""
    forwards = rows = 0
    for window in windows:
        for phase, one in window["phases"].items():
            name, _, width = phase.partition(" × ")
            if name == "deep":
                forwards, rows = forwards + one["count"], rows + one["count"] * int(width)
    return rows / forwards


def numerics(found: Result) -> list[str]:
    rows = []
    for kind, label in {"bf16": "fused bf16", "int8": "INT8", "fp8": "FP8 (E4M3)"}.items():
        if kind not in found:
            continue
        one = found[kind]
        layers = one.get("layers")
        pictures = [f"{one[key]['psnr_db']:.1f} dB" for key in ("pictures", "pictures+deepcache") if key in one]
        rows.append(
            (
                label,
                *(f"{one[p]['cosine']:.5f}, {one[p]['psnr_db']:.1f} dB" for p in ("forward", "twenty_steps", "vae")),
                f"{layers['median_cosine']:.5f}, {layers['worst'][0][1]:.4f}" if layers else NONE,
                NONE if kind == "bf16" or not pictures else ", ".join(pictures),
                NONE if "company" not in one else "yes" if one["company"]["deterministic_equal"] else "no",
            )
        )  # fmt: skip
    header = (
        f"`{found['model']}`, compared with diffusers in bf16", "one forward", "latents after 20 steps", "VAE",
        "single layers, median and worst", "images, without and with DeepCache", "deterministic in a batch",
    )  # fmt: skip
    return markdown(header, rows)


def cohost(found: Result) -> list[str]:
    rows = []
    for name, label in {"int8": "INT8", "int8+deepcache": 'INT8, DeepCache "auto"'}.items():
        if name not in found:
            continue
        one = found[name]
        both = one["together"]
        tpot = [1000 * seconds for seconds in both["tpot_p50_p99_s"]]
        rows.append(
            (
                label, f"{one['image_alone']['images_s']:.2f}", f"{both['images_s']:.2f}",
                f"{one['text_alone']['tokens_s']:,.0f}", f"{both['tokens_s']:,.0f}", f"{one['sum']:.2f}",
                f"{tpot[0]:.1f} ms, {tpot[1]:.1f} ms",
            )
        )  # fmt: skip
    header = ("", "images/s alone", "together", "tokens/s alone", "together", "sum of shares", "TPOT p50, p99")
    return markdown(header, rows)


def text_steps(found: Result) -> list[str]:
    kinds = [kind for kind in _KINDS if f"steps {kind}" in found]
    names = list(found[f"steps {kinds[0]}"])
    rows = []
    for name in names:
        read = found[f"steps {kinds[0]}"][name]
        cells = [found[f"steps {kind}"].get(name) for kind in kinds]
        rows.append(
            (
                name, *(NONE if one is None else f"{one['graph_ms']:.2f} ({one['step_ms']:.2f})" for one in cells),
                f"{read['read_gb']:.1f} GB, {read['graph_ms'] * read['share_of_roofline']:.2f} ms",
            )
        )  # fmt: skip
    first = _KINDS[kinds[0]]
    header = ("ms per step: graph alone (until tokens are on the host)", *(_KINDS[kind] for kind in kinds))
    return markdown((*header, f"bytes read in {first}, lower bound at 4.8 TB/s (computed)"), rows)


def text_engine(found: Result) -> list[str]:
    """Measured tokens per second, from the first request to the last token."""
    rows = [
        (f"Diptych, {_KINDS[kind]}, through the engine", requests, "128/128", f"{one['tokens_per_s']:,.0f}")
        for kind in _KINDS
        for requests in ("64", "256")
        if (one := found.get(f"engine {kind} {requests}"))
    ]
    if one := found.get("generate_batch"):
        rows.append(("transformers `generate_batch`, bf16", "64", "128/64", f"{one['tokens_per_s']:,.0f}"))
    return markdown(("measured", "concurrent requests", "tokens in/out", "tokens/s"), rows)


def text_rates(found: Result) -> list[str]:
    """Computed tokens per second of static batches."""
    kinds = [kind for kind in _KINDS if any(name.startswith(f"{kind} ") for name in found["rates"])]
    settings = [name.removeprefix(f"{kinds[0]} ") for name in found["rates"] if name.startswith(f"{kinds[0]} ")]
    rows = [
        (setting, *(f"{rate:,.0f}" if (rate := found["rates"].get(f"{kind} {setting}")) else NONE for kind in kinds))
        for setting in settings
    ]
    return markdown(("computed: static batches, tokens in/out", *(f"{_KINDS[kind]}, tokens/s" for kind in kinds)), rows)


def service(found: Result, scored: Result) -> list[str]:
    """The service over HTTP: throughput by DeepCache plan, beside the engine's, and latency."""
    served, alone = found["stages"]["serve"], found["stages"]["engine"]
    rows = []
    for schedule, label in _SERVED_WITH.items():
        one = served[f"deepcache {schedule}"]
        ratio = score_ratio(scored, _SCORED[schedule])
        single = served["alone"].get(schedule)
        rows.append(
            (
                label, f"{one['pictures_per_s']:.2f}", f"{alone[f'deepcache {schedule}']['pictures_per_s']:.2f}",
                f"{one['p50_s']:.2f} s, {one['p99_s']:.2f} s", f"{single['p50_s']:.2f} s" if single else NONE,
                gate(_SCORED[schedule], ratio) if ratio else NONE,
            )
        )  # fmt: skip
    clients = served["deepcache off"]["clients"]
    header = (
        f"SDXL's shape over HTTP, {clients} clients", "images/s", "engine alone, in process",
        "latency p50, p99", "p50 of a single client", "CLIP score gate on emoji-xl",
    )  # fmt: skip
    return markdown(header, rows)


def threads(found: Result) -> list[str]:
    """Images per second over HTTP of one worker for each GPU, by the CPU threads of each worker."""
    titles = {"half": "20 steps, guidance, DeepCache in every second", "four": "4 steps, no guidance"}
    rows = []
    for name, case in found["threads"].items():
        # Workers of a checkout from before do not announce their number.
        number = next(filter(None, case["threads"]), found["torch_default_threads"])
        label = f"{name}: {number}" if name.endswith("default") else name
        cpu = [
            f"{min(case[mode]['worker_cpu_percent'])} to {max(case[mode]['worker_cpu_percent'])}%" for mode in titles
        ]
        rows.append((label, *(f"{case[mode]['pictures_per_s']:.2f}" for mode in titles), *cpu))
    header = (
        f"{found['workers']} GPUs, {found['clients']} clients; CPU threads of each worker",
        *(f"images/s, {title}" for title in titles.values()), "CPU of a worker, the first", "the second",
    )  # fmt: skip
    return markdown(header, rows)


def starts(found: Result) -> list[str]:
    """Waiting times: quantization, cold and warm starts, first image, and until all graphs are recorded."""
    stages = found["stages"]
    cold, warm, meanwhile = stages["serve"], stages["warm"], stages["serve"]["while_recording"]
    done = [next(one for one in stage["graphs"] if one["recorded"] == one["wanted"]) for stage in (cold, warm)]
    rows = [
        ("`diptych quantize`, once", f"{stages['quantize']['seconds']:.0f} s", NONE),
        ("from `diptych serve` to ready", f"{cold['cold_ready_s']:.1f} s", f"{warm['ready_s']:.1f} s"),
        ("first image after that", f"{cold['first_picture_s']:.1f} s", f"{warm['first_picture_s']:.1f} s"),
        ("all graphs recorded, from the start", *(f"{one['recorded']} after {one['at_s']:.0f} s" for one in done)),
        ("images/s in half a minute of recording during traffic", f"{meanwhile['pictures_per_s']:.2f}", NONE),
    ]
    return markdown(("", "cold: nothing compiled", "warm: with caches"), rows)


def fidelity(found: Result) -> list[str]:
    """PSNR of the embedded model's images on the GPU against fp32 on the CPU, with equal seeds."""
    one = found["stages"]["emoji"]["against_fp32"]
    rows = [
        (_KINDS[kind], str(of["pictures"]), *(f"{of[f'psnr_{key}_db']:.1f} dB" for key in ("mean", "median", "min")),
         f"{of['brighter_levels']:+.2f} levels of 255")
        for kind, of in one.items()
    ]  # fmt: skip
    header = ("emoji-xl on the GPU, shipped scales", "images", "mean PSNR", "median", "minimum", "mean brightness")
    return markdown(header, rows)


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


def loras(*found: Result) -> list[str]:
    """A deep step whose rows have LoRAs beside one without, by rank, layers and where the shares are added."""
    behind, inside = "behind the products", "in the products"
    rows = []
    for one in found:
        for layers, measured in one["layers"].items():
            ways = [measured["ways"][way] for way in (inside, behind)]
            equal = all(way["equal"] and way["changed"] for way in ways)
            cells = (f"{way['ms']:.1f} ms, {way['ratio']:.1%}" for way in ways)
            rows.append((layers, str(one["rank"]), f"{measured['plain_ms']:.1f} ms", *cells, "yes" if equal else "no"))
    header = (
        "layers with a share",
        "rank",
        "without LoRAs",
        f"{inside}, throughput",
        f"{behind}, throughput",
        "bits as alone",
    )
    said = "{model} in {precision}, {loras} different LoRAs in {rows} rows; median of {rounds}.".format_map(found[0])
    return [*markdown(header, rows), "", said]


TABLES = {
    "h200-loras": Table(("h200/loras", "h200/loras-64"), loras),
    "h200-control": Table(("h200/control",), control),
    "h200-engine": Table(("h200/engine", "ways"), engine),
    "h200-plans": Table(("h200/plans",), plans),
    "h200-phases": Table(("h200/engine",), phases),
    "h200-numerics": Table(("h200/numerics",), numerics),
    "h200-cohost": Table(("h200/cohost",), cohost),
    "h200-text-steps": Table(("h200/text",), text_steps),
    "h200-text-engine": Table(("h200/text",), text_engine),
    "h200-text-rates": Table(("h200/text",), text_rates),
    "h200-service": Table(("h200/service", "ways"), service),
    "h200-threads": Table(("h200/threads",), threads),
    "h200-starts": Table(("h200/service",), starts),
    "h200-fidelity": Table(("h200/emoji-xl",), fidelity),
}
