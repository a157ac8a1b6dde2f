"""The command line: `diptych generate | bench | serve`.

Knows arguments, progress and exit codes (2 for input that cannot be used); imports the rest of the house only when it
is needed, because imports are most of what a short command costs.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from core.config import Settings
    from pipeline.parameters import ImageParameters
    from pipeline.prompts import Prompt
    from workers.build import Works


class UsageError(ValueError):
    """Something that the user gave cannot be used. The message names it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    for library in ("torch", "filelock", "urllib3", "httpx"):
        logging.getLogger(library).setLevel(logging.WARNING)
    from core.batching.runner import Refused
    from core.config import SettingsError

    expected: tuple[type[Exception], ...] = (UsageError, SettingsError, Refused)
    try:
        return int(options.run(options) or 0)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except expected as error:
        print(f"diptych: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diptych", description="Text-to-image serving: SDXL, batched step by step.")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what happens inside")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="draw pictures", description="Draw a picture for each prompt.")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT")
    generate.add_argument(
        "--prompts",
        dest="file",
        type=Path,
        metavar="FILE",
        help="a prompt a line, or a .tsv/.csv with a column prompt or caption",
    )
    generate.add_argument("--limit", type=int, metavar="N", help="only the first N prompts of FILE")
    generate.add_argument("-o", "--out", type=Path, default=Path("out"), metavar="DIR", help="default: %(default)s")
    generate.add_argument("-n", "--count", type=int, default=1, help="pictures a prompt, with seeds counting up")
    generate.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    generate.add_argument("--seed", type=int, help="of the first picture; default: a random one")
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
        one.add_argument("--steps", type=int, default=20, help="default: %(default)s")
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
    serve.add_argument("-o", "--out", type=Path, default=Path("out"), metavar="DIR", help="default: %(default)s")
    serve.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    _add_model(serve)
    serve.set_defaults(run=_serve)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder in diffusers' format or a hub id; default: the embedded model")
    parser.add_argument("--variant", help="of the weight files, such as fp16")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--threads", type=int, help="CPU threads; default: one per core")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compiled code beside eager mode")


def _settings(options: argparse.Namespace, **given: Any) -> Settings:
    from core.config import read

    chosen = {name: getattr(options, name) for name in ("model", "variant", "precision", "threads", "compile")}
    return read(**{**given, **{name: value for name, value in chosen.items() if value is not None}})


def _open(settings: Settings, console: Console, measure_s: float = 0.0) -> Works:
    """Build the works under a spinner; a model that does not load is the user's to mend."""
    from pipeline.load import ModelError
    from workers.build import build

    with console.status("starting") as status:
        try:
            return build(settings, measure_s=measure_s, say=status.update)
        except ModelError as error:
            raise UsageError(f"model: {error}") from error


# -- generate ------------------------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from core.batching.request import Request
    from pipeline import parameters

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
    for prompt in prompts:
        _check(replace(draft, prompt=prompt.text), prompt, options, {(draft.width, draft.height)}, None)
    _check_out(options.out)
    settings = _settings(options, compile=options.compile or False)
    with _open(settings, console) as works:
        native = works.images.model.native
        if size is None:
            draft = replace(draft, width=native, height=native)
        for prompt in prompts:
            whole = replace(draft, prompt=prompt.text)
            _check(whole, prompt, options, works.images.sizes, works.images.schedulers)
        works.images.check(Request("check", "image", replace(draft, prompt=prompts[0].text)))
        jobs = (
            (replace(draft, prompt=prompt.text, seed=(seed + k) % (parameters.MAX_SEED + 1)), prompt)
            for prompt in prompts
            for k in range(options.count)
        )
        return _draw(works, jobs, len(prompts) * options.count, options.steps, options.out, console)


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    from pipeline.prompts import Prompt, PromptsError, read

    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit: must be at least 1, not {options.limit}")
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
    whole: ImageParameters, prompt: Prompt, options: argparse.Namespace, sizes: Any, schedulers: Sequence[str] | None
) -> None:
    """Refuse a picture before anything is drawn, and say where its prompt stands."""
    from core.batching.runner import Refused
    from pipeline.parameters import check

    try:
        check(whole, sizes, schedulers if schedulers is not None else [whole.scheduler or ""])
    except Refused as error:
        where = f"{options.file}: row {prompt.row}: " if prompt.name else ""
        raise UsageError(where + str(error) if str(error).startswith("prompt") else str(error)) from error


def _check_out(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out: {folder} cannot be written ({error.strerror})") from error


def _draw(
    works: Works, jobs: Iterator[tuple[ImageParameters, Prompt]], total: int, each: int, out: Path, console: Console
) -> int:
    """Keep the engine full with `total` pictures of `each` steps, and write what is done; hold none longer."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    started = time.monotonic()
    written: list[Path] = []
    pending: dict[Future[Any], Path] = {}
    with Progress(*columns, console=console) as progress:
        steps = progress.add_task("steps", total=total * each)
        pictures = progress.add_task("pictures", total=total)
        while True:
            while len(pending) < 2 * works.settings.max_requests and (job := next(jobs, None)) is not None:
                pending[_submit(works, job[0], lambda: progress.advance(steps))] = out / _file_name(*job)
            if not pending:
                break
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                path = pending.pop(future)
                progress.advance(pictures)
                failure = future.exception()
                if failure is not None:
                    console.print(f"[red]{path.name}[/red]: {type(failure).__name__}: {failure}", soft_wrap=True)
                    continue
                picture = future.result()
                try:
                    picture.write(path)
                except OSError as error:
                    raise UsageError(f"--out: {path} cannot be written ({error.strerror})") from error
                written.append(path)
                for warning in picture.warnings:
                    console.print(f"[yellow]{path.name}[/yellow]: {warning}", soft_wrap=True)
    took_s = time.monotonic() - started
    if total == 1 and written:
        print(written[0])
    else:
        print(f"{len(written)} pictures in {out} in {took_s:.1f} s, {len(written) / took_s:.2f} a second")
    return 0 if len(written) == total else 1


def _submit(works: Works, wanted: ImageParameters, tick: Callable[[], None]) -> Future[Any]:
    from core.batching.request import Outcome, Request

    def listen(_: Request, outcome: Outcome) -> None:
        if outcome.progress is not None and outcome.progress[0] and not outcome.finished:
            tick()

    return works.engine.submit(Request(secrets.token_hex(8), "image", wanted, listener=listen))


def _file_name(wanted: ImageParameters, prompt: Prompt) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", wanted.prompt.lower()).strip("-")[:48].rstrip("-") or "picture"
    name = re.sub(r"[^\w.-]+", "_", prompt.name).strip(".")[:64]
    return "-".join(part for part in (name, slug, str(wanted.seed)) if part) + ".png"


# -- bench and serve -----------------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> int:
    import importlib

    from benchmarks.record import BenchError

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

    console = Console(stderr=True)
    _check_out(options.out)
    with _open(_settings(options), console, measure_s=1.0) as works:
        native = works.images.model.native
        console.print(f"{works.images.model.name}: type a prompt, get a picture in {options.out} (Ctrl-D ends)")
        for line in sys.stdin:
            if not line.strip():
                continue
            wanted = ImageParameters(line.strip(), secrets.randbelow(2**32), native, native, steps=options.steps)
            try:
                _draw(works, iter([(wanted, Prompt(line, 1, ""))]), 1, options.steps, options.out, console)
            except Refused as error:
                console.print(f"[red]{error}[/red]")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
