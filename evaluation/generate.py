"""Generates a run's missing images: keeps the source full, writes each image as it finishes, shows progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from evaluation.captions import Caption
from evaluation.run import RunWriter
from evaluation.sources import ImageSource, SourceImage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from contract.image import ImageParameters

T = TypeVar("T")
_SHOWN = 300  # characters of a note
_EVERY_S = 60.0


class GenerationOutcome(NamedTuple):
    """The outcome: how many images failed, and notes for readers of the scores."""

    failed: int
    notes: list[str]


def seed_of(caption: Caption, offset: int) -> int:
    """A caption's seed: the offset plus its index. Runs with equal offsets share their noise, caption by caption."""
    from contract.bounds import next_seed

    return next_seed(offset, caption.index)


class GenerationJob(NamedTuple):
    """One image of a run."""

    writer: RunWriter
    caption: Caption
    parameters: ImageParameters


def draw(
    writer: RunWriter, source: ImageSource, draft: ImageParameters, seed_offset: int, progress: Progress
) -> GenerationOutcome:
    """Generate all missing images, `draft` with each caption and its seed; a failed image is reported and skipped.

    Raises `run.RunError` if another model than before generates, and OSError if images cannot be written.
    """
    run = writer.run
    jobs = [job_of(writer, caption, draft, seed_offset) for caption in run.missing]
    steps = progress.add_task("steps", total=len(jobs) * draft.steps)
    bar = progress.add_task("pictures", total=len(run.captions), completed=len(run.records))
    progress_log = ProgressLog(progress.console, "pictures", len(run.records))

    def ended() -> None:
        progress.advance(bar)
        progress_log.update(len(run.records), len(run.captions))

    return draw_jobs(jobs, source, progress.console, tick=lambda: progress.advance(steps), ended=ended)


def job_of(writer: RunWriter, caption: Caption, draft: ImageParameters, seed_offset: int) -> GenerationJob:
    """The job of a caption: `draft` with its text and seed."""
    return GenerationJob(writer, caption, replace(draft, prompt=caption.text, seed=seed_of(caption, seed_offset)))


def draw_jobs(
    jobs: Iterable[GenerationJob],
    source: ImageSource,
    console: Console,
    *,
    tick: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
) -> GenerationOutcome:
    """Generate images of one or several runs, all in one stream; a failed one is reported and skipped.

    `tick` is called for each step, `ended` for each image that is written. Raises as `draw`.
    """
    from pipeline.pixels.picture import file_name

    started, failed, notes = time.monotonic(), 0, dict[str, None]()
    sessions: dict[int, int] = {}  # of each writer
    for (writer, caption, parameters), future in stream(
        source, ((job, job.parameters) for job in jobs), source.width, tick
    ):
        session = sessions.setdefault(id(writer), writer.run.sessions)
        failure = future.exception()
        if failure is not None:
            failed += 1
            _say(console, f"caption {caption.index + 1} ({caption.id}): {type(failure).__name__}: {failure}", "red")
            continue
        image: SourceImage = source.take(future.result())
        for warning in image.warnings:
            _say(console, f"{caption.id}: {warning}", "yellow")
        notes |= dict.fromkeys(writer.check_fingerprint(read_fingerprint(image.png)))
        writer.add(
            caption, parameters.seed, file_name(parameters, f"{caption.index:05d}"), image.png,
            session=session, seconds=time.monotonic() - started,
        )  # fmt: skip
        ended()
    return GenerationOutcome(failed, list(notes))


def stream(
    source: ImageSource,
    requests: Iterable[tuple[T, ImageParameters]],
    width: int,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[tuple[T, Future[Any]]]:
    """Keep `width` requests in flight. Yields each one's first element with the future, as it ends."""
    left, pending = iter(requests), dict[Future[Any], T]()
    while True:
        while len(pending) < width and (item := next(left, None)) is not None:
            pending[source.submit(item[1], tick)] = item[0]
        if not pending:
            return
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            yield pending.pop(future), future


class ProgressLog:
    """Prints progress now and then where bars cannot be drawn: in a log, or through a pipe."""

    def __init__(self, console: Console, label: str, done: int) -> None:
        self._console = console
        self._what = label
        self._first = done
        self._started = self._said = time.monotonic()

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._console.is_terminal or now - self._said < _EVERY_S:
            return
        self._said = now
        rate = (done - self._first) / (now - self._started)
        left = f"{(total - done) / rate / 60:.0f} min left" if rate else "none yet"
        _say(self._console, f"{done} of {total} {self._what}, {rate:.2f}/s, {left}", "")


def read_fingerprint(png: bytes) -> Mapping[str, Any]:
    """The fingerprint in one of our PNGs; empty if there is none."""
    from core import pictures

    fingerprint = json.loads(pictures.opened(png).info.get("fingerprint", "{}"))
    return fingerprint if isinstance(fingerprint, dict) else {}


@contextmanager
def bars(console: Console) -> Iterator[Progress]:
    """Progress bars with rate and remaining time."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars
    from rich.text import Text

    class Rate(ProgressColumn):
        """The mean since the bar was added; by recent steps, what ends together would count as made in that moment."""

        def __init__(self) -> None:
            super().__init__()
            self._first: dict[int, float] = {}  # completed when the bar was added, which renders it

        def render(self, task: Task) -> Text:
            made = task.completed - self._first.setdefault(task.id, task.completed)
            elapsed_s = task.finished_time or task.elapsed
            return Text(f"{made / elapsed_s:.2f}/s" if made > 0 and elapsed_s else "", style="progress.data.speed")

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Bars(*columns, console=console, speed_estimate_period=60) as progress:
        yield progress


def _say(console: Console, note: str, style: str) -> None:
    """Print a line beside the bars: it may quote a caption, which is no markup."""
    line = note if len(note) <= _SHOWN else note[:_SHOWN] + "…"
    console.print(line, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
