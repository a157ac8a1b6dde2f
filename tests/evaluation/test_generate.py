"""Drawing a run: the source is kept full and no fuller, and failures cost their own picture only."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console

from cli.scoring import looking
from contract.image import ImageParameters
from evaluation import generate
from evaluation.captions import Caption
from evaluation.run import RunWriter
from evaluation.sources import SourceImage
from tests.evaluation.test_run import png

DRAFT = ImageParameters("", 0, 8, 8, steps=4)
CAPTIONS = [Caption(k, str(k), f"picture {k}") for k in range(30)]


class Counting:
    """Finishes one picture whenever `width` are in flight, the latest first; some fail."""

    def __init__(self, width: int, failing: set[str] | None = None, threads: str = "2 threads") -> None:
        self.width = width
        self.asked: list[ImageParameters] = []
        self.most = 0
        self._failing = failing or set()
        self._threads = threads
        self._open: list[tuple[ImageParameters, Future[Any]]] = []

    def submit(self, wanted: ImageParameters, tick: Callable[[], None]) -> Future[Any]:
        self.asked.append(wanted)
        future: Future[Any] = Future()
        self._open.append((wanted, future))
        self.most = max(self.most, len(self._open))
        for _ in range(wanted.steps):
            tick()
        if len(self._open) == self.width or len(self.asked) == len(CAPTIONS):
            for one, pending in reversed(self._open):
                if one.prompt in self._failing:
                    pending.set_exception(FloatingPointError("NaN"))
                else:
                    pending.set_result(one)
            self._open.clear()
        return future

    def take(self, result: Any) -> SourceImage:
        chunks = PngInfo()
        printed = {"model": "m", "weights": "w", "precision": "fp32", "device": self._threads}
        chunks.add_itxt("fingerprint", json.dumps(printed))
        stream = io.BytesIO()
        Image.new("RGB", (8, 8), (result.seed % 256, 0, 0)).save(stream, "PNG", pnginfo=chunks)
        return SourceImage(stream.getvalue(), ("[bold]a note[/bold]",) if result.prompt == "picture 3" else ())

    def pixels(self, result: Any) -> Any:
        raise NotImplementedError


def draw(writer: RunWriter, source: Counting, console: Console) -> generate.GenerationOutcome:
    with generate.bars(console) as progress:
        return generate.draw(writer, source, DRAFT, 100, progress)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)


def test_it_keeps_the_source_full_and_no_fuller(tmp_path: Path, console: Console) -> None:
    source = Counting(6)
    with RunWriter(tmp_path / "r", {}, CAPTIONS) as writer:
        assert draw(writer, source, console) == (0, [])
        assert not writer.run.missing and writer.run.drawn_by["model"] == "m"
    assert source.most == 6
    assert generate.read_fingerprint(png(1)) == {}
    assert [(one.prompt, one.seed) for one in source.asked] == [(f"picture {k}", 100 + k) for k in range(30)]
    assert generate.seed_of(Caption(3, "", ""), 2**63 - 1) == 2
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3: [bold]a note[/bold]" in said and "30/30" in said and "120/120" in said and "/s" in said


def test_a_failure_costs_its_own_picture_and_is_tried_again(tmp_path: Path, console: Console) -> None:
    with RunWriter(tmp_path / "r", {}, CAPTIONS) as writer:
        assert draw(writer, Counting(4, {"picture 7", "picture 29"}), console).failed == 2
    assert "caption 8 (7): FloatingPointError: NaN" in console.file.getvalue()  # type: ignore[attr-defined]
    with RunWriter(tmp_path / "r", {}, CAPTIONS) as writer:
        assert [caption.index for caption in writer.run.missing] == [7, 29]
        again = Counting(1, threads="8 threads")
        assert draw(writer, again, console).notes == ["pictures differ in device: '2 threads' and '8 threads'"]
        assert [one.seed for one in again.asked] == [107, 129] and not writer.run.missing
        assert writer.run.records[7].session == 1 and writer.run.records[8].session == 0


def test_a_log_is_told_how_far_it_is(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_EVERY_S", 0.0)
    with RunWriter(tmp_path / "r", {}, CAPTIONS) as writer:
        draw(writer, Counting(10), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f"{done} of 30 pictures" in said for done in (10, 20, 30)) and "min left" in said


def test_what_was_done_before_its_bar_has_no_rate() -> None:
    """A network reports its first batch when it has seen it; the next one counts anew, in the same bar."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with generate.bars(console) as progress:
        look = looking(progress)
        for done in (12, 6, 12):
            look("looking at int8", done, 12)
            progress.refresh()
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "12/12" in text and "/s" not in text


def test_the_rate_is_the_mean_of_what_was_made_here() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with generate.bars(console) as progress:
        now = progress.get_time()
        progress.get_time = lambda: now
        bar = progress.add_task("pictures", total=12, completed=2)
        now += 20.0
        progress.advance(bar, 10)  # all end together
        progress.refresh()
        assert isinstance(console.file, io.StringIO)
        assert "0.50/s" in console.file.getvalue()
