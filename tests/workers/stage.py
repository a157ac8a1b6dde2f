"""A worker for tests: the real process (Celery, Redis, Engine, lanes), with runners that compute nothing.

    python -m tests.workers.stage [--text [NAMES]] [--real] [--step S] [--load S] [--log FILE] [--name NAMES]
                                  [--compiling]

Settings come from DIPTYCH_*, as for `diptych worker`: DIPTYCH_REDIS_URL, DIPTYCH_ARTIFACTS_URL, DIPTYCH_LEASE_S,
DIPTYCH_STUCK_S, DIPTYCH_DRAIN_S, DIPTYCH_IMAGE_JOBS, DIPTYCH_MAX_REQUESTS … It is up (Celery consumes) after about a
second, and then its card in the registry is "ready".

    --text      serve the text queue too, on a lane of its own; a text job's parameters are {"prompt", "steps"}, its
                result is {"text": …}; a prompt is expanded by writing it in capitals; `--text one,two` are two models
    --real      pictures by the settings' own model (DIPTYCH_MODEL=random:tiny) instead of the stand-in; takes torch's
                time to start
    --step S    seconds of one iteration of the stand-ins, however many requests share it (default 0.01)
    --load S    seconds that "loading the model" takes (default 0), in which the card says "starting"
    --log FILE  append a line of JSON for each event: {"at": time.monotonic(), "pid", "event", "request", "modality"};
                events: receive (a message was taken; the request is the job), admit (begins to run), step, done,
                release; a request is named {job}/{attempt}/{picture}
    --files N   jobs may name files, such as LoRAs; N are kept in memory, and each that is read is the event "read"
    --name NAME the stand-in's model is called so, and its pictures differ from those of other names; "one,two" are
                two models of one engine
    --cold S    models but the first are not in memory before their first job; they are said to take S seconds to load
                On SIGUSR1 the event is "celery", and its request says what Celery keeps: see `_kept`.
    --compiling a thread never ends, as the compiler's may not

The stand-in's model is called "stage" and draws 32x32 (64x32, 32x64) PNGs of one colour, which prompt and seed decide:
see `picture`. Words in a prompt, for both modalities, make things happen at its second iteration (its first step):

    KILL        the process gets SIGKILL (as from the kernel's memory killer)
    HANG        the iteration never ends: a device that hangs
    FAIL        the iteration raises an ordinary error
    MEMORY      the iteration runs out of memory
    OVERFLOW    a network returns NaN
    STEP=0.5    its own iterations take so many seconds instead of --step

KILL, HANG, FAIL, MEMORY and OVERFLOW may be given a number of attempts: KILL=1 kills at the job's first attempt only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.worker import state

from contract.card import ImageCard, ImageCosts, ImageLimits, ImageOffer, TextCard, TextCosts, TextOffer
from contract.errors import Invalid
from contract.image import ImageJob
from contract.text import TextJob
from core import config
from core.batching.engine import Engine
from core.batching.request import Outcome, Request
from core.batching.runner import Lane, LaneTicket, NotYet, OutOfMemory
from core.batching.slots import Slots
from core.config import Settings
from core.failures import NotFinite
from core.jobs.broker import Envelope
from workers import boot
from workers.artifact_writer import ArtifactWriter
from workers.handlers import JobHandler, Output
from workers.images.handler import ImageJobProgress, pictures
from workers.serving_runtime import ServingRuntime, handlers_of
from workers.stages.expansion import ExpansionStage
from workers.stages.stage import JobStage
from workers.tasks import WorkerTasks

if TYPE_CHECKING:
    from workers.build import Runtime

MODEL, TEXT = "stage", "stage-text"
SIZES = ((32, 32), (64, 32), (32, 64))
SCHEDULERS = ("euler",)
Note = Callable[[str, Request], None]


def picture(prompt: str, seed: int, width: int, height: int) -> bytes:
    """The stand-in's PNG. Equal arguments, equal bytes."""
    colour = hashlib.sha256(f"{seed} {prompt}".encode()).digest()[:3]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + colour * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@dataclass(frozen=True)
class TextParameters:
    prompt: str
    steps: int

    @property
    def text(self) -> str:
        return self.prompt.upper()


class Group(NamedTuple):
    modality: str
    phase: str


@dataclass
class _Progress:
    slots: list[int]
    step: int = 0


class StageRunner:
    """Phases encode → step × n for any modality; all that share an iteration wait together."""

    patience_s = 20.0

    def __init__(self, modality: str, lane: Lane, step_s: float, slots: int, note: Note) -> None:
        self.modality = modality
        self._lane = lane
        self._step_s = step_s
        self._slots = Slots(slots)
        self._note = note

    def check(self, request: Request) -> None:
        if self.modality == "image":
            request.parameters.check(ImageOffer(SIZES, SCHEDULERS))
        elif not isinstance(request.parameters.steps, int) or request.parameters.steps < 1:
            raise Invalid("steps", "must be a whole number, 1 or more")

    def resources(self, request: Request) -> frozenset[str]:
        return frozenset()

    def admit(self, request: Request) -> NotYet | None:
        slots = self._slots.take()
        if slots is None:
            return NotYet()
        request.work, request.phase = _Progress(slots), "encode"
        self._note("admit", request)
        return None

    def release(self, request: Request) -> None:
        self._slots.give(request.work.slots)
        self._note("release", request)

    def held(self) -> int:
        return self._slots.taken

    def group(self, request: Request) -> Group:
        return Group(self.modality, request.phase)

    def rows(self, request: Request) -> int:
        return 1

    def iterations(self, request: Request) -> int:
        return request.parameters.steps - request.work.step if request.phase == "step" else 1

    def left_s(self, request: Request, rows: int) -> float:
        return self.iterations(request) * self._step_s

    def next_group(self, request: Request) -> None:
        return None

    def limit(self, group: object) -> int:
        return 64

    def lane_of(self, group: object) -> str:
        return self.modality

    def cost(self, group: object, rows: int) -> float:
        return self._step_s

    def launch(self, requests: Sequence[Request]) -> LaneTicket:
        requests = list(requests)

        def compute() -> None:
            time.sleep(max(_own(request.parameters.prompt, "STEP", self._step_s) for request in requests))
            for request in requests:
                if request.phase == "step" and request.work.step == 0:
                    _happen(request)

        return self._lane.start(compute, lambda _: {request.id: self._commit(request) for request in requests})

    def _commit(self, request: Request) -> Outcome:
        steps, work = request.parameters.steps, request.work
        if request.phase == "encode":
            request.phase = "step"
            return Outcome(progress=(0, steps))
        work.step += 1
        self._note("step", request)
        if work.step < steps:
            return Outcome(progress=(work.step, steps))
        self._note("done", request)
        return Outcome(progress=(steps, steps), result=request.parameters, finished=True)


def _own(prompt: str, word: str, otherwise: float) -> float:
    found = re.search(rf"\b{word}=([\d.]+)", prompt)
    return float(found[1]) if found else otherwise


def _happen(request: Request) -> None:
    attempt = int(request.id.split("/")[1])
    for word in re.findall(r"\b(?:KILL|HANG|FAIL|MEMORY|OVERFLOW)\b", request.parameters.prompt):
        if attempt > _own(request.parameters.prompt, word, 1e9):
            continue
        if word == "KILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "HANG":
            threading.Event().wait()
        elif word == "FAIL":
            raise RuntimeError("the prompt wanted it")
        elif word == "OVERFLOW":
            raise NotFinite("the fp16 VAE of x")
        else:
            raise OutOfMemory("the prompt wanted it")


class _Panel:
    expansion_instruction = ""
    load_s = 0.0
    reads_files = False

    def __init__(self, step_s: float, name: str) -> None:
        self._step_s, self.name = step_s, name

    def files(self, job: Any) -> set[str]:
        return set()

    def held_files(self) -> tuple[str, ...]:
        return ()

    def tally(self, requests: Sequence[Any]) -> ImageJobProgress:
        return ImageJobProgress([request.steps for request in requests])


class StagePictures(_Panel):
    """The image panel of the stand-in: parameters, progress and results in the shape of real ones."""

    modality = "image"

    def __init__(
        self, step_s: float, name: str = MODEL, files: int = 0, note: Callable[[str], None] = print, load_s: float = 0.0
    ) -> None:
        """Has so many files in memory; the last used are kept, and `note` is told of each that is read. With `load_s`
        the model is in memory from its first job on.
        """
        super().__init__(step_s, name)
        self.load_s, self.reads_files = load_s, files > 0
        self._most, self._note = files, note
        self._files: list[str] = []
        self._lock = threading.Lock()

    def files(self, job: ImageJob) -> set[str]:
        return job.files()

    def held_files(self) -> tuple[str, ...]:
        return tuple(self._files)

    def card(self) -> ImageCard:
        sizes = {f"{w}x{h}": self._step_s for w, h in SIZES}
        return ImageCard(
            name=self.name, precision="none", device="cpu", native=32, sizes=tuple(SIZES), schedulers=tuple(SCHEDULERS),
            default_scheduler=SCHEDULERS[0], limits=ImageLimits(), capacity_per_s=1 / max(1e-6, 20 * self._step_s),
            costs=ImageCosts(encode_s=self._step_s, vae_s=self._step_s, solo_step_s=sizes, row_step_s=sizes),
        )  # fmt: skip

    def read(self, parameters: Mapping[str, Any]) -> ImageJob:
        return ImageJob.read(parameters)

    def requests(self, job: ImageJob) -> list[Any]:
        self.load_s = 0.0
        self.read_files(job)
        return pictures(job)

    def read_files(self, job: ImageJob) -> None:
        with self._lock:
            for file in job.files():
                if file not in self._files:
                    self._note(file)
                kept = [other for other in self._files if other != file]
                self._files = [*kept, file][-self._most :] if self._most else []

    def build_result(self, job: Any, outputs: Sequence[Output], artifact_writer: ArtifactWriter) -> dict[str, Any]:
        images = []
        for output in outputs:
            request = output.value
            prompt = request.prompt if self.name == MODEL else f"{self.name}: {request.prompt}"
            data = picture(prompt, request.seed, request.width, request.height)
            images.append({
                "key": artifact_writer.put(data, "image/png"), "seed": request.seed, "width": request.width,
                "height": request.height, "media_type": "image/png", "size_bytes": len(data), "warnings": [],
                **output.facts,
            })  # fmt: skip
        return {"images": images}


class StageTextJob(NamedTuple):
    """What the stand-in is asked for."""

    parameters: Mapping[str, Any]


class StageText(_Panel):
    """A text panel that repeats the prompt."""

    modality = "text"

    def __init__(self, step_s: float, name: str = TEXT) -> None:
        super().__init__(step_s, name)

    def card(self) -> TextCard:
        return TextCard(
            name=self.name, precision="none", device="cpu", limits=TextOffer(), costs=TextCosts(),
            capacity_per_s=1 / max(1e-6, 20 * self._step_s),
        )  # fmt: skip

    def read(self, parameters: Mapping[str, Any]) -> StageTextJob:
        return StageTextJob(parameters)

    def requests(self, job: StageTextJob | TextJob) -> list[Any]:
        parameters = job.to_dict() if isinstance(job, TextJob) else job.parameters
        if "messages" in parameters:
            return [TextParameters(parameters["messages"][-1]["content"], 2)]
        return [TextParameters(parameters["prompt"], parameters["steps"])]

    def build_result(self, job: Any, outputs: Sequence[Output], artifact_writer: ArtifactWriter) -> dict[str, Any]:
        return {"text": outputs[0].value.prompt}


def handler_of(works: Runtime, modality: str = "image") -> JobHandler:
    return next(handler for handler in handlers_of(works).values() if handler.modality == modality)


@dataclass
class Stage:
    engine: Engine
    handlers: dict[str, JobHandler]
    stages: tuple[JobStage, ...]
    failed: tuple[str, ...] = ()
    closers: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        self.engine.close()
        for close in self.closers:
            close()


def build(
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
    *,
    text: str = "",
    real: bool = False,
    llm: bool = False,
    step_s: float = 0.01,
    load_s: float = 0.0,
    name: str = MODEL,
    files: int = 0,
    cold_s: float = 0.0,
    note: Note = lambda event, request: None,
) -> ServingRuntime:
    """The stand-in's engine and panels, in this process."""
    if load_s:
        say("loading the stage")
        time.sleep(load_s)
    runners: list[Any] = []
    handlers: dict[str, JobHandler] = {}
    stages: tuple[JobStage, ...] = (ExpansionStage(),)
    closers: list[Callable[[], None]] = []
    if real:
        from workers.build import build as build_real

        works = build_real(settings, measure_s=0.2, say=say)
        works.engine.close()
        runners.append(works.images)
        handlers |= handlers_of(works)
        stages = works.stages
        closers += [works.images.close, works.lane.close]
    if llm:
        from workers.build_text import text_runner
        from workers.text.handler import TextJobHandler

        own_lane = Lane("text")
        texts = text_runner(settings, own_lane, say)
        assert texts is not None
        runners.append(texts)
        handlers[texts.model.name] = TextJobHandler(texts)
        closers += [texts.close, own_lane.close]
    for modality, wanted in (("image", not real), ("text", bool(text))):
        if wanted:
            lane = Lane(modality)
            runners.append(StageRunner(modality, lane, step_s, settings.max_requests, note))
            told = lambda file: note("read", Request(file, "image", None))  # noqa: E731
            panels: list[JobHandler] = [StageText(step_s, own) for own in text.split(",")]
            if modality == "image":
                names = name.split(",")
                panels = [StagePictures(step_s, own, files, told, cold_s if at else 0) for at, own in enumerate(names)]
            handlers |= {panel.name: panel for panel in panels}
            closers.append(lane.close)
    return Stage(Engine(runners, starvation_s=settings.starvation_s), handlers, stages, closers=closers)


def _writer(path: Path | None) -> Note:
    if path is None:
        return lambda event, request: None
    stream = path.open("ab", buffering=0)  # a line is one write: several processes may share the file

    def note(event: str, request: Request) -> None:
        line = {"at": time.monotonic(), "pid": os.getpid(), "event": event, "request": request.id}
        stream.write((json.dumps({**line, "modality": request.modality}) + "\n").encode())

    return note


def _kept() -> str:
    """How many requests Celery keeps: known, reserved and active ones."""
    return f"{len(state.requests)} {len(state.reserved_requests)} {len(state.active_requests)}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", nargs="?", const=TEXT, default="")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--llm", action="store_true")
    parser.add_argument("--step", type=float, default=0.01, dest="step_s")
    parser.add_argument("--load", type=float, default=0.0, dest="load_s")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--name", default=MODEL)
    parser.add_argument("--cold", type=float, default=0.0, dest="cold_s")
    parser.add_argument("--files", type=int, default=0)
    parser.add_argument("--compiling", action="store_true")
    options = vars(parser.parse_args())
    if options.pop("compiling"):
        threading.Thread(target=threading.Event().wait).start()  # no daemon: the interpreter would wait for it
    note = _writer(options.pop("log"))
    signal.signal(signal.SIGUSR1, lambda *_: note("celery", Request(_kept(), "", None)))
    serve = WorkerTasks.run

    def run(tasks: WorkerTasks, envelope: Envelope) -> None:
        note("receive", Request(envelope.id, envelope.queue, None))
        serve(tasks, envelope)

    WorkerTasks.run = run  # type: ignore[method-assign]
    return boot.run(config.read(), lambda settings, say: build(settings, say, note=note, **options))


if __name__ == "__main__":
    sys.exit(main())
