"""Generates a list of images with its own engine for the CLI: keeps the engine full, shows progress, writes files.

Imports no torch at module level, because the worker imports it before torch.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.image import ImageJob
from workers.handlers import Output
from workers.stages import stage
from workers.stages.checker import UnsafeImage

if TYPE_CHECKING:
    from rich.console import Console

    from contract.image import ImageParameters
    from core.batching.engine import Engine
    from pipeline.pixels.picture import Picture
    from pipeline.text.prompts import PromptRow
    from workers.build import Runtime


class OutputWriteError(ValueError):
    """Images cannot be written. The message names the folder, and how many were written."""


@contextlib.contextmanager
def folder(path: Path) -> Iterator[None]:
    """Ensure that a folder exists and is writable; remove it again afterwards if nothing was written."""
    created: list[Path] = []
    try:
        created += [parent for parent in (path, *path.parents) if not parent.exists()]  # innermost first
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(bytes(4096))  # a full disk still creates empty files
    except OSError as error:
        _remove(created)
        raise OutputWriteError(f"--out: {path} cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        _remove(created)


def _remove(created: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # folders that hold an image stay
        for path in created:
            path.rmdir()


def draw(
    runtime: Runtime,
    jobs: Iterator[tuple[ImageParameters, PromptRow]],
    total: int,
    each: int,
    out: Path,
    console: Console,
) -> int:
    """Keep the engine full with `total` images of `each` steps, and write finished ones; never keeps more in memory."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from pipeline.pixels.picture import file_name

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    started = time.monotonic()
    written: list[Path] = []
    used_names: set[str] = set()
    pending: dict[Future[Any], tuple[PromptRow, Path]] = {}
    try:
        # Ctrl-C interrupts only the main thread: another one writes and counts a file, fully or not at all.
        with ThreadPoolExecutor(1, "files") as files, Progress(*columns, console=console) as progress:
            steps = progress.add_task("steps", total=total * each)
            pictures = progress.add_task("pictures", total=total)
            while True:
                while len(pending) < 2 * runtime.settings.max_requests and (job := next(jobs, None)) is not None:
                    future = submit(runtime.engine, job[0], lambda: progress.advance(steps))
                    pending[future] = job[1], out / _free(file_name(job[0], job[1].name), used_names)
                if not pending:
                    break
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    row, path = pending.pop(future)
                    files.submit(_write, future, row, path, runtime, console, written).result()
                    progress.advance(pictures)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{len(written)} of {total} pictures were written") from None
    except OSError as error:
        been = f"{len(written)} of {total} pictures were written"
        raise OutputWriteError(f"--out: {out} cannot be written ({error.strerror}); {been}") from error
    took_s = time.monotonic() - started
    if total == 1 and written:
        print(written[0], flush=True)
    else:
        print(f"{len(written)} pictures in {out} in {took_s:.1f} s, {len(written) / took_s:.2f} a second", flush=True)
    return 0 if len(written) == total else 1


def _write(
    future: Future[Any], row: PromptRow, path: Path, runtime: Runtime, console: Console, written: list[Path]
) -> None:
    """Check a finished image, write it, count it, and print its notes. Raises OSError."""
    at = f"{'row' if row.name else 'PROMPT'} {row.row}"  # of a file, or an argument
    notes: tuple[str, ...]
    try:
        job, output = _finished(future.result(), runtime)
    except UnsafeImage:
        notes, style = (f"{at}: the picture was refused by the checker (DIPTYCH_CHECKER), and is not written",), "red"
    except Exception as failure:
        notes, style = (f"{at}: {type(failure).__name__}: {failure}",), "red"
    else:
        output.value.write(path)
        written.append(path)
        notes, style = output.value.warnings, "yellow"
        content = output.facts.get("content")
        if job.checker == "tag" and content is not None and content["flagged"]:
            labels = ", ".join(f"{label} {score:g}" for label, score in content["labels"].items())
            notes = (*notes, f"the checker flags the picture: {labels}")
    for note in notes:  # may quote the prompt: no markup, and possibly long
        line = f"{path.name}: {note if len(note) <= 300 else note[:300] + '…'}"
        console.print(line, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _finished(picture: Picture, runtime: Runtime) -> tuple[ImageJob, Output]:
    """The job of a picture that the engine has drawn, and what comes of it. Raises as the stages."""
    job, outputs = stage.check_all(runtime.stages, ImageJob(picture.parameters)), [Output(picture)]
    for each in stage.requested(runtime.stages, job):
        outputs = each.after(job, outputs, lambda: False)
    return job, outputs[0]


def _free(name: str, used_names: set[str]) -> str:
    """The file name, numbered if this command has used it: equal prompts with equal seeds make two files."""
    stem, number = name.removesuffix(".png"), 1
    while name.casefold() in used_names:  # some file systems are case-insensitive
        number += 1
        name = f"{stem}-{number}.png"
    used_names.add(name.casefold())
    return name


def submit(engine: Engine, parameters: ImageParameters, tick: Callable[[], None], model: str = "") -> Future[Any]:
    """Submit an image; `tick` is called for each step. A request that the engine rejects fails its future alone.

    `model` is one of the engine's, if it has several.
    """
    from contract.errors import Invalid
    from core.batching.pending import rejected
    from core.batching.request import Outcome, Request

    def listen(_: Request, outcome: Outcome) -> None:
        if outcome.progress is not None and outcome.progress[0] and not outcome.finished:
            tick()

    try:
        return engine.submit(Request(secrets.token_hex(8), "image", parameters, listener=listen, model=model))
    except Invalid as error:
        return rejected(error)
