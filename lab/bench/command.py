"""`diptych bench`: runs a benchmark by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import (
    Commands,
    UsageError,
    add_model,
    add_steps,
    check_range,
    check_steps,
    create_cache_folder,
    model_errors,
    read_settings,
)

if TYPE_CHECKING:
    from core.config import Settings


_Option = tuple[str, Any, str]
"""The name of an option, its default, by whose type it is read (or that type), and its description."""


def add(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measure, and store what was measured.")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    for name, pictures, text in (
        ("ladder", 64, "pictures per second, one optimization after the other"),
        ("arrivals", 300, "latency under Poisson arrivals, against request-level batching"),
        ("serve", 300, "the whole service through HTTP: its capacity, and latency under Poisson arrivals"),
    ):
        parser = _parser(benches, name, text, [("pictures", pictures, "of a measurement")])
        add_steps(parser)
        if name == "ladder":
            parser.add_argument("--rungs", metavar="NAME,…", help="only these")
            parser.add_argument(
                "--instructions", choices=("native", "avx2"), help="that all rungs are limited to; default: native"
            )
            parser.add_argument(
                "--student", metavar="NAME", help="of the rungs turbo; default: the model's, with -turbo"
            )
            parser.add_argument(
                "--compile-limit", type=float, metavar="S",
                help="torch.compile may take so long, else its row is left out; default: 300",
            )  # fmt: skip
        _end(parser, _bench)
        parser.set_defaults(what=name)
    _add_text(benches)
    _add_cohost(benches)
    _add_simulate(benches)


@contextmanager
def _bench_errors() -> Iterator[None]:
    """Context: raises `UsageError` for what a benchmark cannot measure."""
    from lab.bench.harness.record import BenchError

    try:
        yield
    except BenchError as error:
        raise UsageError(str(error)) from error


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[Settings]:
    """Context: the settings, with their cache folder made; raises `UsageError` for what cannot be measured."""
    settings = read_settings(options)
    create_cache_folder(settings)
    with _bench_errors(), model_errors():
        yield settings


def _parser(benches: Commands, name: str, text: str, options: Sequence[_Option] = ()) -> argparse.ArgumentParser:
    """The parser of a benchmark with these options of numbers and texts."""
    parser: argparse.ArgumentParser = benches.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    for option, default, of in options:
        kind = type(default)
        metavar = {int: "N", float: "S"}.get(kind, "MIX")
        parser.add_argument(
            f"--{option}", type=kind, default=default, metavar=metavar, help=f"{of}; default: %(default)s"
        )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the JSON goes; default: lab/bench/results")
    return parser


def _end(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the options of the model, which stand last."""
    add_model(parser)
    parser.set_defaults(run=run)


def _add_simulate(benches: Commands) -> None:
    text = "a fleet of devices under a virtual clock, by measured costs: throughput and latency, to plan capacity with"
    parser = _parser(benches, "simulate", text, (
        ("pictures", 20_000, "arrivals"), ("seed", 0, "of all that is random"),
        ("gpus", "1", "devices, such as 1,8"), ("load", "0.8", "shares of the table's capacity, such as 0.5,0.8"),
        ("steps", "20", "of denoising, as values with weights, such as 20=3,30=1"),
        ("guidance", "on", "on, off, 0:0.5"),
        ("deadlines", "none", "seconds, or none"), ("priorities", "5", "0 (most urgent) to 9"),
        ("name", "simulate", "of the JSON and the plot"),
    ))  # fmt: skip
    table = parser.add_mutually_exclusive_group()
    table.add_argument(
        "--costs", default="h200", metavar="NAME", help="a table of lab/simulation/tables, or a file; h200"
    )
    table.add_argument("--measure", type=Path, metavar="FILE", help="measure the engine of --model into this table")
    parser.add_argument("--bursts", metavar="ON,OFF", help="mean seconds of traffic and of silence; default: Poisson")
    parser.add_argument("--sizes", metavar="MIX", help="such as 1024x1024; default: the table's largest")
    parser.add_argument(
        "--deepcache", dest="schedules", default="off", metavar="MIX", help="off, auto, 3, 3:resnet; off"
    )
    for setting, means in (
        ("image-jobs", "jobs that a worker takes at once"),
        ("max-requests", "pictures in the making on one device"),
        ("max-rows", "rows of one forward"),
        ("memory-mib", "that pictures in the making may hold; default: no bound"),
    ):
        parser.add_argument(f"--{setting}", type=int, metavar="N", help=means)
    add_model(parser, deepcache=False)
    parser.set_defaults(run=_simulate)


def _add_text(benches: Commands) -> None:
    text = "tokens per second of answers: transformers, and our engine with INT8 and with guesses"
    parser = _parser(benches, "text", text, (("requests", 64, "of a rung"), ("turns", 3, "of each rung")))
    parser.add_argument(
        "--text-model", metavar="NAME", help="default: the embedded one, then a seeded Llama of 100 million"
    )
    parser.add_argument(
        "--text-draft", default="", metavar="NAME", help="makes guesses; default: look-up, or its own draft"
    )
    parser.add_argument("--rungs", metavar="NAME,…", help="only these")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: one per core")
    parser.set_defaults(run=_text)


def _add_cohost(benches: Commands) -> None:
    text = "pictures and text on one engine: each panel's throughput alone and together"
    parser = _parser(benches, "cohost", text, (("seconds", 30.0, "of each turn"), ("turns", 2, "of each")))
    add_steps(parser)
    parser.add_argument("--text-model", metavar="NAME", help="a folder or a hub id; default: the embedded one")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="keep text's objective even if that makes pictures' batches narrow",
    )
    _end(parser, _cohost)


def _cohost(options: argparse.Namespace) -> int:
    from lab.bench import cohost

    check_steps(options)
    check_range(options, "seconds", 0.1, 3600)
    check_range(options, "turns", 1)
    with _opened(options) as settings:
        cohost.run(
            settings,
            seconds=options.seconds,
            steps=options.steps,
            turns=options.turns,
            results=options.results,
            strict=options.strict,
        )
    return 0


def _text(options: argparse.Namespace) -> int:
    from lab.bench import text

    check_range(options, "requests", 1)
    check_range(options, "turns", 1)
    settings = read_settings(options)
    named = [(options.text_model, options.text_draft)] if options.text_model else text.embedded()
    with _bench_errors():
        for model, draft in named:
            text.run(
                settings, model=model, draft=draft, requests=options.requests, turns=options.turns,
                results=options.results, rungs=options.rungs.split(",") if options.rungs else text.RUNGS,
            )  # fmt: skip
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from lab.simulation import costs, simulate
    from lab.simulation import options as simulated

    settings = read_settings(options)
    with _bench_errors():
        if options.measure:
            from lab.simulation import measure

            simulated.plan(options, settings)  # before minutes are spent
            create_cache_folder(settings)
            with model_errors():
                table = measure.profile_costs(settings, simulated.sizes(options.sizes))
            measure.save(table, options.measure)
        else:
            table = costs.read(costs.find(options.costs))
        plan = simulated.plan(options, settings, table)
        simulate.run(table, plan, results=options.results, name=options.name)
    return 0


def _bench(options: argparse.Namespace) -> int:
    import importlib

    check_steps(options)
    settings = read_settings(options)
    create_cache_folder(settings)
    module = importlib.import_module(f"lab.bench.{options.what}")
    limit_s = getattr(options, "compile_limit", None)
    if limit_s is not None and not 0 < limit_s <= 86_400:
        raise UsageError(f"--compile-limit: must be greater than 0 and at most 86400, not {limit_s:g}")
    arguments = {
        "rungs": options.rungs.split(",") if getattr(options, "rungs", None) else None, "compile_limit_s": limit_s,
        "student": getattr(options, "student", None), "instructions": getattr(options, "instructions", None),
    }  # fmt: skip
    with _bench_errors(), model_errors():
        module.run(settings, steps=options.steps, pictures=options.pictures, results=options.results,
                   **{name: value for name, value in arguments.items() if value})  # fmt: skip
    return 0
