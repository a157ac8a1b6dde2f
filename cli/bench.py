"""`diptych bench`: runs a benchmark by its name; what is measured is the benchmark's own business."""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.arguments import (
    Commands,
    UsageError,
    add_model,
    add_steps,
    check_steps,
    make_cache,
    model_errors,
    read_settings,
)


def add(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measure, and store what was measured.")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    for name, text in (
        ("ladder", "pictures per second, one optimization after the other"),
        ("arrivals", "latency under Poisson arrivals, against request-level batching"),
        ("peers", "one UNet forward in INT8, against diffusers, torch.compile and OpenVINO"),
        ("serve", "the whole service through HTTP: its capacity, and latency under Poisson arrivals"),
    ):
        one = benches.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add_steps(one)
        one.add_argument(
            "--pictures",
            type=int,
            default={"ladder": 64, "arrivals": 300, "peers": 0, "serve": 300}[name],
            metavar="N",
            help="default: %(default)s",
        )
        one.add_argument("--results", type=Path, metavar="DIR", help="where the JSON goes; default: benchmarks/results")
        if name == "ladder":
            one.add_argument("--rungs", metavar="NAME,…", help="only these")
        add_model(one)
        one.set_defaults(run=_bench, what=name)


def _bench(options: argparse.Namespace) -> int:
    import importlib

    from benchmarks.record import BenchError

    check_steps(options.steps)
    chosen = read_settings(options)
    make_cache(chosen)
    module = importlib.import_module(f"benchmarks.{options.what}")
    given = {"rungs": options.rungs.split(",") if getattr(options, "rungs", None) else None}
    try:
        with model_errors():
            module.run(chosen, steps=options.steps, pictures=options.pictures, results=options.results,
                       **{name: value for name, value in given.items() if value})  # fmt: skip
    except BenchError as error:
        raise UsageError(str(error)) from error
    return 0
