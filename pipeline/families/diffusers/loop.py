"""Runs one call of a pipeline on a thread beside its caller's, which stops after every step until it is told to go on.

Of the two threads exactly one runs: `advance` passes a baton to the pipeline's thread and waits until it comes back.
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, ClassVar

import torch

from core.failures import NotFinite
from pipeline.checkpoints.folder import first_line

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a call has stopped: after so many steps of so many, 0 where the prompt is encoded.

    `latents` are those after the step, if the pipeline hands them out; `image` is the result after the end.
    """

    done: int
    total: int
    latents: torch.Tensor | None = None
    image: Any = None


class _Cancelled(BaseException):
    """Unwinds a call that is not to go on; pipelines catch `Exception` in places."""


class _CallThread:
    """A thread that runs calls, one at a time. It outlives them: what torch keeps by thread, such as cuDNN's plans, a
    new thread would build anew. With a new thread for each call a picture on a GPU took a quarter of a second longer.
    """

    _idle: ClassVar[list[_CallThread]] = []  # the last one that ended is taken first

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], None], Event]] = SimpleQueue()
        Thread(target=self._run, name="pipeline", daemon=True).start()

    @classmethod
    def start(cls, call: Callable[[], None]) -> Event:
        """Run the call, which raises nothing, on an idle thread; returns what is set when nothing of it is left."""
        try:
            thread = cls._idle.pop()
        except IndexError:
            thread = cls()
        ended = Event()
        thread._calls.put((call, ended))
        return ended

    def _run(self) -> None:
        while True:
            call, ended = self._calls.get()
            call()
            del call
            self._idle.append(self)
            ended.set()
            del ended


class PipelineLoop:
    """One call of a pipeline that belongs to this loop alone: a copy whose progress bar the loop replaces.

    The call stops where its progress bar begins, which is after prompts are encoded, and after each step: in
    `callback_on_step_end` where the class has it, else where the progress bar moves.
    """

    def __init__(self, pipeline: Any, arguments: dict[str, Any], *, calls_back: bool, name: str) -> None:
        """`name` is the model's, with its precision, in errors."""
        self._pipeline, self._arguments, self._calls_back, self._name = pipeline, arguments, calls_back, name
        pipeline.progress_bar = self._progress_bar
        for attribute, part in [*vars(pipeline).items()]:
            if hasattr(part, "postprocess"):
                own = copy.copy(part)
                own.postprocess = self._checked(part.postprocess)
                setattr(pipeline, attribute, own)
        pipeline.numpy_to_pil = self._checked(pipeline.numpy_to_pil)
        if calls_back:
            arguments["callback_on_step_end"] = self._after_step
        self._go, self._stopped = Lock(), Lock()  # held but while the baton is passed
        self._go.acquire()
        self._stopped.acquire()
        self._position = Position(0, 0)
        self._error: BaseException | None = None
        self._cancelled = self._ended = False
        self._returned: Event | None = None  # of its thread

    @property
    def ended(self) -> bool:
        """Return whether the call has returned a picture or raised an error."""
        return self._ended

    def advance(self) -> Position:
        """Let the call go on to its next stop; raises what it raises. Not to be called after its end."""
        if self._returned is None:
            self._returned = _CallThread.start(self._run)
        else:
            self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback leads back to this loop
        return self._position

    def cancel(self) -> None:
        """End the call where it has stopped, and wait until it has returned; it computes nothing more."""
        self._cancelled = True
        if self._returned is not None and not self._returned.is_set():
            if not self._ended:
                self._go.release()
            self._returned.wait()
        self._pipeline = self._arguments = None  # type: ignore[assignment]  # what they hold
        self._position = Position(0, 0)

    def _run(self) -> None:
        try:
            device = self._pipeline._execution_device
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            output = self._pipeline(**self._arguments)
            image = (output[0] if isinstance(output, tuple) else output.images)[0]
            self._position = Position(self._position.done, self._position.total, image=image)
        except _Cancelled:
            self._unload()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
            _clear_frames(error)
            self._unload()
        finally:
            self._ended = True
            self._stopped.release()

    def _checked(self, convert: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes pictures of a network's pixels, but raises `NotFinite` for NaN and infinity."""

        def run(pixels: Any, *arguments: Any, **options: Any) -> Any:
            if not bool(torch.as_tensor(pixels).isfinite().all()):
                latents = self._position.latents
                drawn = latents is None or bool(latents.isfinite().all())
                raise NotFinite(f"the {'VAE' if drawn else 'denoiser'} of {self._name}")
            return convert(pixels, *arguments, **options)

        return run

    def _unload(self) -> None:
        """Do what a call does at its end: move networks that are offloaded whole off the GPU."""
        try:
            self._pipeline.maybe_free_model_hooks()
        except Exception as error:  # nothing waits for a call that is cancelled, and an error has its own cause
            log.warning("networks stay on the GPU until the next call: %s", first_line(error))

    def _stop(self, position: Position) -> None:
        """Give the baton back, and wait for it."""
        self._position = position
        self._stopped.release()
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled

    def _after_step(self, pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        done = self._position.done + 1
        self._stop(Position(done, max(done, self._total(pipeline)), tensors.get("latents")))
        return tensors

    def _total(self, pipeline: Any) -> int:
        """Return the steps of the loop: some samplers take several for each that the progress bar has."""
        count = getattr(pipeline, "num_timesteps", None)
        return count if isinstance(count, int) else self._position.total

    def _progress_bar(self, iterable: Any = None, total: int | None = None) -> _StepBar:
        return _StepBar(self, iterable, len(iterable) if total is None else total)

    def _begin(self, total: int) -> None:
        self._stop(Position(self._position.done, self._position.done + total))

    def _step(self, count: int) -> None:
        if not self._calls_back:
            self._stop(Position(self._position.done + count, self._position.total))


def _clear_frames(error: BaseException | None) -> None:
    """Release the local variables of a call that raised this: tensors, for as long as anyone keeps the error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _ = frame.f_locals  # pipelines call locals(): its copy, which Python 3.11 and 3.12 keep, follows when read
        error = error.__cause__ or error.__context__


class _StepBar:
    """Stands in for tqdm."""

    def __init__(self, loop: PipelineLoop, iterable: Any, total: int) -> None:
        self._loop, self._iterable = loop, iterable
        loop._begin(total)

    def __enter__(self) -> _StepBar:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self._loop._step(1)

    def update(self, count: int = 1) -> None:
        self._loop._step(count)

    def set_description(self, *_: object, **__: object) -> None:
        return None

    set_postfix = set_description
