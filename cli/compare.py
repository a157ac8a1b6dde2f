"""`diptych evaluate compare`: compares runs with the first of them, and writes the report."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from cli.arguments import Commands
from cli.scoring import add_scoring, looking, open_lens, scoring_errors, try_references


def add(commands: Commands) -> None:
    compare = commands.add_parser(
        "compare",
        help="hold runs against the first of them",
        description="Hold runs over the same captions against the first of them: table, report.html, report.json.",
    )
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs; the first is the base")
    compare.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="for the report")
    add_gate_arguments(compare)
    add_scoring(compare)
    compare.set_defaults(run=run)


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--real", type=Path, metavar="REF", help="what FID is taken from: pictures, .npz or a run")
    parser.add_argument(
        "--fid-rise", type=float, metavar="PERCENT", help="of the gate; default: 2, and 4 for runs with DeepCache"
    )
    parser.add_argument(
        "--clip-change", type=float, metavar="PERCENT", help="of the gate; default: 0.2, and 0.5 with DeepCache"
    )
    parser.add_argument("--shown", type=int, default=24, metavar="N", help="captions in the grid; default: 24")


def run(options: argparse.Namespace) -> int:
    """Compare `options.runs`, and write the report into `options.out`."""
    from rich.console import Console

    from evaluation import compare, generate, references, report
    from evaluation.run import EvaluationRun, write_json

    console = Console(stderr=True)
    with scoring_errors():
        runs = [EvaluationRun.read(path) for path in options.runs]
        lens = open_lens(options, None, runs[0])
        try_references([options.real] if options.real else [], lens)
        options.out.mkdir(parents=True, exist_ok=True)
        with generate.bars(console) as progress:
            look = looking(progress)
            real = None
            if options.real:
                cache = options.out / "references"
                real = references.look(options.real, lens, cache, partial(look, f"looking at {options.real.name}"))
            gates = compare.Gates(options.fid_rise, options.clip_change)
            result = compare.runs(runs, lens, real, gates=gates, resamples=options.resamples, look=look)
        write_json(options.out / "report.json", result)
        page = report.page(result, runs, count=options.shown)
        (options.out / "report.html").write_text(page, "utf-8")
    for note in result["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    print(compare.table(result))
    print(options.out / "report.html", flush=True)
    return 0
