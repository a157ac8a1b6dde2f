"""`diptych evaluate`: generates a prompt set and scores it; `diptych evaluate sweep`: compares several ways to generate
it.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cli import closed_division, compare, drawing, plugins
from cli.arguments import Commands, UsageError, add_command, add_model, add_plan, check_range, read_settings
from cli.request import SHARED, add_request
from cli.scoring import add_scoring, open_lens, score, scoring_errors, try_references
from contract.precision import CHOICES
from contract.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from contract.image import ImageParameters
    from core.config import Settings
    from evaluation.run import EvaluationRun, RunWriter
    from evaluation.scoring_networks import ScoringNetworks

_NAMED = 10  # ids of pictures that failed
_EXAMPLES = """examples:
  diptych evaluate --prompts captions.tsv --out runs/fp32 --against real
  diptych evaluate --prompts captions.tsv --out runs/int8 --precision int8 --against real --against runs/fp32
  diptych evaluate compare runs/fp32 runs/int8 --real real --out report
  diptych evaluate sweep --prompts captions.tsv --limit 1000 --variants fp32 int8 int8+2 --real real --out runs
  diptych evaluate mlperf --files mlperf --precision int8 --out mlperf-int8

A run that was stopped, in whatever way, goes on where it was when the same command is given again. The seed of the
k-th caption, from 0, is the seed offset plus k: runs with equal offsets share their noise, picture by picture.

exit codes: 0 drawn and scored; 1 some pictures failed; 2 the input cannot be used, and is named;
130 stopped with Ctrl-C (143: by SIGTERM)
"""


_SWEEP = """Draw the same captions in several ways, a run for each in DIR, and hold them against the first:

  diptych evaluate sweep --prompts captions.tsv --limit 1000 --real real --out runs --variants fp32 fp32@1000000 int8
"""
_VARIANTS = f"""A variant is a precision ({", ".join(CHOICES)}), then perhaps + and a DeepCache schedule,
then perhaps / and a guidance interval: int8+2/0:0.5; or = and a tuned plan: int8=balanced; then perhaps @ and a
seed offset: fp32@1000000 is fp32 with other seeds, whose distance from fp32 gates allow.
"""


def add(commands: Commands) -> None:
    evaluate = add_command(
        commands,
        "evaluate",
        "draw a prompt set and score it",
        "Draw every caption of a file with the engine, and score the pictures: FID, KID, CMMD, CLIP.",
        _EXAMPLES,
    )
    add_arguments(evaluate)
    added = plugins.names("evaluate")
    parts = evaluate.add_subparsers(metavar=", ".join(("compare", "sweep", "mlperf", *added)))
    compare.add(parts)
    closed_division.add(parts, add_arguments)
    sweep = add_command(
        parts,
        "sweep",
        "draw in several ways, then compare them",
        _SWEEP,
        _VARIANTS,
    )
    sweep.usage = "diptych evaluate sweep --prompts FILE --out DIR --real DIR --variants HOW ... [options]"
    _add_drawing(sweep)
    compare.add_gate_arguments(sweep)
    sweep.add_argument(
        "--variants", nargs="+", default=["fp32", "int8", "int8+2"], metavar="HOW", help="default: fp32 int8 int8+2"
    )
    sweep.set_defaults(run=_sweep, compile=None, against=[])
    for name in added:
        plugins.add(parts, name, "evaluate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a run and its scores."""
    _add_drawing(parser)
    parser.add_argument(
        "--against",
        type=Path,
        action="append",
        default=[],
        metavar="REF",
        help="a folder of pictures, an .npz with mu and sigma, or another run; may be given more than once",
    )
    parser.set_defaults(run=run, compile=None)


def _add_drawing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a .tsv, .csv, .json, .jsonl with id and caption (or file and name)",
    )
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="the run's folder")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N captions")
    parser.add_argument("--server", metavar="URL", help="of a running service that draws, instead of this process")
    parser.add_argument(
        "--seed-offset", type=int, default=0, metavar="N", help="seed of the first caption; default: %(default)s"
    )
    parser.add_argument("--size", metavar="WxH", help="in pixels; default: the model's own")
    add_request(parser, SHARED)
    parser.add_argument(
        "--protocol", choices=("mlperf",),
        help="MLPerf's: 20 steps of Euler, guidance 8, its negative prompt and fixed latent; ends with its verdict",
    )  # fmt: skip
    parser.add_argument(
        "--latent", metavar="FILE",
        help="an .npy that every picture begins from; default: none, and latents.npy beside FILE in MLPerf's protocol",
    )  # fmt: skip
    add_model(parser)
    add_plan(parser)
    add_scoring(parser)


def run(options: argparse.Namespace) -> int:
    """Draw the run and score it."""
    from rich.console import Console

    console = Console(stderr=True)
    with _drawn(options, console) as (source, lens):
        return 1 if source is None else score(source, options, lens, console)


def _sweep(options: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(stderr=True)
    variants = [_variant(options, name) for name in options.variants]
    if len({variant.out for variant in variants}) < len(variants):
        raise UsageError("--variants: names one twice")
    for variant in variants:
        console.print(variant.out.name, style="bold", markup=False, highlight=False)
        with _drawn(variant, console) as (source, _):
            if source is None:
                return 1
    options.runs = [variant.out for variant in variants]
    return compare.run(options)


def _variant(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """Options of one variant: PRECISION, with +DEEPCACHE, /GUIDANCE_INTERVAL, =PLAN and @SEED_OFFSET where given."""
    match = re.fullmatch(
        rf"({'|'.join(CHOICES)})(?:\+([^@/=]+))?(?:/([^@/=]+))?(?:=([a-z0-9_-]+))?(?:@([0-9]{{1,19}}))?", name
    )
    if match is None:
        examples = "int8, int8+2, int8+2/0:0.5, int8=balanced or fp32@1000000"
        raise UsageError(f"--variants: must look like {examples}, not {name!r}")
    if options.out is None:
        raise UsageError("--out: must be given")
    precision, deepcache, interval, plan, seeds = match.groups()
    variant_options = vars(options) | {"precision": precision, "out": options.out / re.sub("[:/=]", "-", name)}
    variant_options["against"] = [] if options.real is None else [options.real]  # checked before hours are spent
    variant_options |= {} if deepcache is None else {"deepcache": deepcache}
    variant_options |= {} if interval is None else {"guidance_interval": interval}
    variant_options |= {} if plan is None else {"plan": plan}
    variant_options |= {} if seeds is None else {"seed_offset": int(seeds)}
    return argparse.Namespace(**variant_options)


@contextlib.contextmanager
def _drawn(options: argparse.Namespace, console: Console) -> Iterator[tuple[EvaluationRun | None, ScoringNetworks]]:
    """The run for the options, generated to its end; None if images failed."""
    from evaluation import captions
    from evaluation.run import RunWriter

    if options.prompts is None or options.out is None:
        raise UsageError(f"{'--prompts' if options.prompts is None else '--out'}: must be given")
    check_range(options, "limit", 1)
    # Everything that can be rejected without a model is rejected before one is loaded.
    try:
        rows = captions.read(options.prompts, options.limit)
    except captions.PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error
    if options.protocol:
        drawing.follow_mlperf(options)
    settings = read_settings(options, compile=False).model_copy(update={"plan": ""})  # `options.plan` is for all images
    draft = drawing.draft_of(options, settings, rows[0])
    with scoring_errors():
        lens = open_lens(options, settings)
        try_references(options.against, lens)
        latent, printed = drawing.open_latent(options)
        settings_used = drawing.asked(options, settings, draft) | {"latent": printed}
        with RunWriter(options.out, settings_used, rows) as writer:
            failed = writer.run.missing and _draw(writer, options, settings, draft, latent, console)
            yield None if failed else writer.run, lens


def _draw(
    writer: RunWriter,
    options: argparse.Namespace,
    settings: Settings,
    draft: ImageParameters,
    latent: Tensor | None,
    console: Console,
) -> int:
    """Generate the missing images; returns how many failed."""
    from evaluation import generate

    run = writer.run
    if len(run.records):
        console.print(f"{len(run.records)} of {len(run.captions)} pictures are there", highlight=False)
    try:
        with contextlib.ExitStack() as stack:
            source, draft = drawing.open_source(options, settings, draft, run.missing, latent, stack, console)
            progress = stack.enter_context(generate.bars(console))
            failed, notes = generate.draw(writer, source, draft, options.seed_offset, progress)
    except KeyboardInterrupt:
        done = f"{len(run.records)} of {len(run.captions)} pictures are done; the same command goes on"
        raise KeyboardInterrupt(done) from None
    for note in notes:
        console.print(note, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if failed:
        names = ", ".join(caption.id for caption in run.missing[:_NAMED]) + (", …" if failed > _NAMED else "")
        text = f"{failed} pictures failed ({names}); nothing is scored; the same command tries again"
        print(f"diptych: {printable(text, 1_000)}", file=sys.stderr)
    return failed
