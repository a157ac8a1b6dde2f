"""The command line: `diptych generate | bench | serve`.

Knows arguments, progress and exit codes (2 for input that cannot be used); imports the rest of the house only when it
is needed, because imports are most of what a short command costs.
"""

from __future__ import annotations

import argparse
import gc
import io
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from core.config import Settings
    from pipeline.parameters import ImageParameters
    from pipeline.prompts import Prompt
    from workers.build import Works


_FLAGS = {"negative_prompt": "--negative", "guidance_scale": "--guidance", "prompt": "PROMPT"}  # else --field
_EXAMPLES = """examples:
  diptych generate "a slice of pizza"
  diptych generate "a red panda" -n 4 --seed 7 --steps 30 --size 128x128 -o pandas
  diptych generate --prompts captions.tsv --limit 64 --negative "blurry, low quality"

Each picture's PNG holds its parameters in the text chunks "parameters" and "fingerprint". Where a file of the same
name lies in DIR, from an earlier command with the same prompt and seed, it is replaced.

exit codes: 0 all is drawn; 1 some pictures failed; 2 the input cannot be used, and is named; 130 stopped with Ctrl-C
"""


class UsageError(ValueError):
    """Something that the user gave cannot be used. The message names it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    for library in ("torch", "filelock", "urllib3", "httpx"):
        logging.getLogger(library).setLevel(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no text at all
    try:
        return _run(options)
    except KeyboardInterrupt as error:
        print(f"stopped: {error}" if str(error) else "stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads on: nothing to say, also not when Python flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(options: argparse.Namespace) -> int:
    from core.batching.engine import Closed
    from core.batching.runner import Refused
    from core.config import SettingsError
    from pipeline.folder import ModelError
    from workers.draw import OutError

    try:
        return int(options.run(options) or 0)
    except (UsageError, SettingsError, Refused, OutError) as error:
        print(f"diptych: {error}", file=sys.stderr)
        return 2
    except ModelError as error:
        print(f"diptych: model: {error}", file=sys.stderr)
        return 2
    except Closed as error:
        print(f"diptych: {error} ({error.__cause__ or 'no reason is known'})", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diptych", description="Text-to-image serving: SDXL, batched step by step.")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what happens inside")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        help="draw pictures",
        description="Draw a picture for each prompt. stdout gets the path of a single picture, or one line of summary.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to draw; quote each one")
    generate.add_argument(
        "--prompts",
        dest="file",
        type=Path,
        metavar="FILE",
        help="more prompts: one a line, or a .tsv/.csv with a column prompt or caption (and id: names the files)",
    )
    generate.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of FILE")
    _add_out(generate)
    generate.add_argument(
        "-n", "--count", type=int, default=1, metavar="N", help="pictures a prompt, seeds counting up; default: 1"
    )
    generate.add_argument("--steps", type=int, default=20, metavar="N", help="of denoising; default: %(default)s")
    generate.add_argument("--seed", type=int, metavar="N", help="of each prompt's first picture; default: a random one")
    generate.add_argument("--size", metavar="WxH", help="in pixels; default: the model's own")
    generate.add_argument(
        "--guidance", type=float, default=5.0, metavar="SCALE", help="default: %(default)s; up to 1: off"
    )
    generate.add_argument("--negative", metavar="TEXT", help="what the picture should not show")
    generate.add_argument(
        "--scheduler", metavar="NAME", help="euler, euler-ancestral, dpm++2m or lcm; default: the model's"
    )
    generate.add_argument("--deterministic", action="store_true", help="equal seed and fingerprint give equal bytes")
    _add_model(generate)
    generate.set_defaults(run=_generate, compile=None)

    bench = commands.add_parser("bench", help="measure", description="Measure, and store what was measured.")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    for name, text in (
        ("ladder", "pictures per second, one optimization after the other"),
        ("arrivals", "latency under Poisson arrivals, against request-level batching"),
    ):
        one = benches.add_parser(name, help=text, description=text.capitalize() + ".")
        one.add_argument("--steps", type=int, default=20, metavar="N", help="of denoising; default: %(default)s")
        one.add_argument(
            "--pictures",
            type=int,
            default={"ladder": 64, "arrivals": 300}[name],
            metavar="N",
            help="default: %(default)s",
        )
        one.add_argument("--results", type=Path, metavar="DIR", help="where the JSON goes; default: benchmarks/results")
        if name == "ladder":
            one.add_argument("--rungs", metavar="NAME,…", help="only these")
        _add_model(one)
        one.set_defaults(run=_bench, what=name)

    serve = commands.add_parser(
        "serve", help="draw what is typed", description="Draw a picture for each line of input."
    )
    _add_out(serve)
    serve.add_argument("--steps", type=int, default=20, metavar="N", help="of denoising; default: %(default)s")
    _add_model(serve)
    serve.set_defaults(run=_serve)
    return parser


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("out"), metavar="DIR", help="for the pictures; default: %(default)s"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME", help="a folder in diffusers' format or a hub id; default: the embedded model"
    )
    parser.add_argument("--variant", metavar="WORD", help="of the weight files, such as fp16")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="of the computation; default: fp32")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: one per core")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compiled code beside eager mode")


def _settings(options: argparse.Namespace, **defaults: Any) -> Settings:
    """Settings: an option goes over the environment, the environment over a command's defaults, and these over all."""
    from core.config import read

    chosen = {name: getattr(options, name) for name in ("model", "variant", "precision", "threads", "compile")}
    settings = read(**chosen)
    settings = settings.model_copy(update={k: v for k, v in defaults.items() if k not in settings.model_fields_set})
    if settings.compile:
        try:
            settings.compiled_code.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"DIPTYCH_CACHE_DIR: {error.filename} cannot be made ({error.strerror})") from error
    return settings


def _open(settings: Settings, console: Console, measure_s: float = 0.0) -> Works:
    """Build the works under a spinner."""
    # Imports make millions of objects that stay: looking through them for garbage is a tenth of the start.
    gc.disable()
    try:
        with console.status("starting") as status:
            from workers.build import build

            return build(settings, measure_s=measure_s, say=status.update)
    finally:
        gc.freeze()
        gc.enable()


# -- generate ------------------------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from core.batching.request import Request
    from pipeline import parameters
    from workers.draw import draw, folder

    console = Console(stderr=True)
    # All that can be refused without a model is refused before one is loaded.
    prompts = _prompts(options)
    size = _size(options.size)
    if not 1 <= options.count <= 10_000:
        raise UsageError(f"--count: must be between 1 and 10000, not {options.count}")
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    draft = parameters.ImageParameters(
        prompt="", seed=seed, width=size[0] if size else 0, height=size[1] if size else 0,
        negative_prompt=options.negative, steps=options.steps, guidance_scale=options.guidance,
        scheduler=options.scheduler, deterministic=options.deterministic,
    )  # fmt: skip
    if options.scheduler is None:
        offered: Sequence[str] = ()
    else:
        from pipeline import sigmas

        offered = sigmas.SCHEDULERS
    for prompt in prompts:
        _check(replace(draft, prompt=prompt.text), prompt, options, {(draft.width, draft.height)}, offered)
    settings = _settings(options, compile=False)  # compiling takes longer than most commands; who asks for it gets it
    with folder(options.out), _open(settings, console) as works:
        if size is None:
            draft = replace(draft, width=works.images.model.native, height=works.images.model.native)
        first = replace(draft, prompt=prompts[0].text)
        _check(first, prompts[0], options, works.images.sizes, works.images.schedulers)
        works.images.check(Request("check", "image", first))
        jobs = (
            (replace(draft, prompt=prompt.text, seed=(seed + k) % (parameters.MAX_SEED + 1)), prompt)
            for prompt in prompts
            for k in range(options.count)
        )
        return draw(works, jobs, len(prompts) * options.count, options.steps, options.out, console)


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    from pipeline.prompts import Prompt, PromptsError, read

    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit: must be at least 1, not {options.limit}")
    if options.limit is not None and options.file is None:
        raise UsageError("--limit: counts prompts of a file, and there is no --prompts")
    typed = [Prompt(text, row, "") for row, text in enumerate(options.prompts, 1)]
    if options.file is None:
        if not typed:
            raise UsageError("PROMPT: give at least one, or a file with --prompts")
        return typed
    try:
        return typed + read(options.file, options.limit)
    except PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})[xX×](\d{1,5})", text)
    if match is None:
        raise UsageError(f"--size: must look like 1024x1024, not {text!r}")
    return int(match[1]), int(match[2])


def _check(
    whole: ImageParameters, prompt: Prompt, options: argparse.Namespace, sizes: Any, schedulers: Sequence[str]
) -> None:
    """Refuse a picture before anything is drawn: say which option is wrong, or where the prompt stands."""
    from core.batching.runner import Refused
    from pipeline.parameters import check

    try:
        check(whole, sizes, schedulers)
    except Refused as error:
        field, _, wrong = str(error).partition(": ")
        flag = _FLAGS.get(field, f"--{field}")
        if field == "prompt" and prompt.name:
            flag = f"--prompts: {options.file}: row {prompt.row}"
        elif field == "prompt" and len(options.prompts) > 1:
            flag = f"PROMPT {prompt.row}"
        raise UsageError(f"{flag}: {wrong}") from error


# -- bench and serve -----------------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> int:
    import importlib

    from benchmarks.record import BenchError

    _check_steps(options.steps)
    settings = _settings(options)
    module = importlib.import_module(f"benchmarks.{options.what}")
    given = {"rungs": options.rungs.split(",") if getattr(options, "rungs", None) else None}
    try:
        module.run(settings, steps=options.steps, pictures=options.pictures, results=options.results,
                   **{name: value for name, value in given.items() if value})  # fmt: skip
    except BenchError as error:
        raise UsageError(str(error)) from error
    return 0


def _serve(options: argparse.Namespace) -> int:
    """One process, one terminal: a stand-in for the service, on the engine that the service will use."""
    from rich.console import Console

    from core.batching.runner import Refused
    from pipeline.parameters import ImageParameters
    from pipeline.prompts import Prompt
    from workers.draw import draw, folder

    console = Console(stderr=True)
    _check_steps(options.steps)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is refused line by line, with the rest
    with folder(options.out), _open(_settings(options), console, measure_s=1.0) as works:
        native = works.images.model.native
        console.print(f"{works.images.model.name}: type a prompt, get a picture in {options.out} (Ctrl-D ends)")
        for line in filter(str.strip, sys.stdin):
            wanted = ImageParameters(line.strip(), secrets.randbelow(2**32), native, native, steps=options.steps)
            try:
                draw(works, iter([(wanted, Prompt(line, 1, ""))]), 1, options.steps, options.out, console)
            except Refused as error:
                console.print(str(error), style="red", markup=False, highlight=False)
    return 0


def _check_steps(steps: int) -> None:
    from pipeline.parameters import MAX_STEPS

    if not 1 <= steps <= MAX_STEPS:
        raise UsageError(f"--steps: must be between 1 and {MAX_STEPS}, not {steps}")


def entry() -> None:
    """The console script: run `main`, and end at once where code is still being compiled on a thread of its own.

    The compiler cannot be interrupted, and an interpreter that ends around it aborts.
    """
    code = main()
    if any(thread.name == "compile" for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
