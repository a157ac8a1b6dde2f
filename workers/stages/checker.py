"""Checks the content of finished pictures before anything of them is encoded: tags, blurs or refuses what is flagged.

The checker is a network's folder or a callable; without the setting there is none.
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from contract.content import HIDING, REFUSED, action_of, read_labels
from contract.image import ImageJob
from core.batching.pending import Aborted
from pipeline.checkpoints.folder import ModelError, first_line
from workers.handlers import JobHandler, Output
from workers.images.handler import ImageJobHandler
from workers.stages.stage import JobStage, StageFailed

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from core.config import Settings
    from core.jobs.record import Claim
    from pipeline.content import ContentNetwork, Verdict

log = logging.getLogger(__name__)

_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NO_LABELS: tuple[str, ...] = ()
_MOST = 16  # pictures in one forward on a GPU
_CALLS = 16  # of a callable, at once
_LOOK_S = 0.5  # between looks whether a job has ended, or a call hangs
_CLOSE_S = 5.0  # that the end waits for calls
_WARNINGS = {
    "blur": "the picture is blurred, by this service's checker",
    "refuse": "the picture was refused by this service's checker",
}


class UnsafeImage(StageFailed):
    """All images of a job were refused."""

    code = REFUSED


class CheckFailed(StageFailed):
    """Images could not be checked, so that none may be shown."""

    code = "content_check_failed"


class Checker(Protocol):
    """A checker of contents. Thread-safe. `digest` identifies its files; `labels` flag pictures, if it has some."""

    @property
    def digest(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    def verdicts(self, images: Sequence[Image], stopped: Callable[[], bool] = lambda: False) -> list[Verdict]:
        """Judge pictures in RGB, in order. Raises `Aborted` once `stopped`, and TimeoutError or any other error: then
        nothing is known of them.
        """
        ...

    def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Item:
    """A picture that waits for its verdict. `begun` is when a thread took it; None: none has."""

    picture: Any
    verdict: Future[Verdict]
    begun: float | None = None


class _QueueChecker:
    """Judges pictures in order on threads of its own, `most` of those that wait in a call. Whoever waits for a call of
    more than `within_s` leaves, whatever becomes of its thread.
    """

    def __init__(self, threads: int, most: int, within_s: float) -> None:
        self._most, self._within_s = most, within_s
        self._waiting: deque[_Item] = deque()
        self._taken = 0.0  # when a thread last took pictures
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"checker-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _prepare(self, image: Image) -> Any:
        """The copy of a picture that `_judge` gets."""
        raise NotImplementedError

    def _judge(self, pictures: Sequence[Any]) -> list[Verdict]:
        raise NotImplementedError

    def verdicts(self, images: Sequence[Image], stopped: Callable[[], bool] = lambda: False) -> list[Verdict]:
        items = [_Item(self._prepare(image), Future()) for image in images]
        entered = time.monotonic()
        with self._changed:
            self._waiting.extend(items)
            self._changed.notify_all()
        try:
            return [self._verdict(item, entered, stopped) for item in items]
        finally:  # of a job that has failed or ended no picture is judged any more
            with self._changed:
                for item in items:
                    with suppress(ValueError):
                        self._waiting.remove(item)

    def _verdict(self, item: _Item, entered: float, stopped: Callable[[], bool]) -> Verdict:
        while not wait([item.verdict], _LOOK_S).done:
            if stopped():
                raise Aborted("the job ended while its pictures were checked")
            if time.monotonic() - (item.begun or max(entered, self._taken)) > self._within_s:
                raise TimeoutError(f"no verdict within {self._within_s:g} s (DIPTYCH_CHECKER_S)")
        return item.verdict.result()

    def _run(self) -> None:
        while items := self._take():
            if not self._settle(items):  # one of them may be the cause, or their number
                for item in items:
                    self._settle([item], last=True)
            del items  # not kept until the next ones

    def _take(self) -> list[_Item]:
        """The next pictures; none: it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            items = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            self._taken = time.monotonic()
            for item in items:
                item.begun = self._taken
            return items

    def _settle(self, items: Sequence[_Item], *, last: bool = False) -> bool:
        """Give these pictures their verdicts. False: they have none; if it is the `last` try they have the error."""
        try:
            verdicts = self._judge([item.picture for item in items])
        except BaseException as error:  # whoever waits has to hear of it
            for item in items if last else ():
                item.verdict.set_exception(error)
            return False
        for item, verdict in zip(items, verdicts, strict=True):
            item.verdict.set_result(verdict)
        return True

    def close(self) -> None:
        """End its threads. Does not wait long for one that hangs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


class CallableChecker(_QueueChecker):
    """A callable that gets a picture and returns whether it is fine. Called on several threads at once."""

    def __init__(self, name: str, within_s: float) -> None:
        """Import what `module:callable` names. Raises `ModelError`."""
        module, _, path = name.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for part in path.split("."):
                value = getattr(value, part)
        except Exception as error:  # anything that module raises on import
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ModelError(f"checker {name}: cannot be imported ({reason})") from error
        if not callable(value):
            raise ModelError(f"checker {name}: cannot be called")
        self.digest, self.labels, self._function = name, _NO_LABELS, value
        super().__init__(_CALLS, 1, within_s)

    def _prepare(self, image: Image) -> Image:
        return image.copy()

    def _judge(self, pictures: Sequence[Image]) -> list[Verdict]:
        from pipeline.content import Verdict

        return [Verdict(not self._function(picture), {}) for picture in pictures]


class NetworkChecker(_QueueChecker):
    """A network on a thread of its own. On a GPU it judges all pictures that wait together; on a CPU, where that saves
    nothing, one after another, so that a score depends on nothing else.
    """

    def __init__(self, network: ContentNetwork, within_s: float, most: int = 0) -> None:
        """`most` pictures go into a forward; 0: as many as the network's device has a use for."""
        self._network, self.digest, self.labels = network, network.digest, network.labels
        # One thread: OpenMP keeps a team of threads for every thread that computes.
        super().__init__(1, most or (_MOST if network.device.type == "cuda" else 1), within_s)

    def _prepare(self, image: Image) -> Tensor:
        return self._network.prepare(image)

    def _judge(self, pictures: Sequence[Tensor]) -> list[Verdict]:
        import torch

        return self._network.verdicts(torch.stack([*pictures]))


def load(settings: Settings, device: str) -> Checker | None:
    """Load the settings' checker; None if there is none. Raises `ModelError`."""
    name, labels = settings.checker, read_labels(settings.checker_labels)
    if not name:
        for given in ("checker_action", "checker_labels"):
            if given in settings.model_fields_set and getattr(settings, given) not in ("", "off"):
                raise ModelError(f"{given}: there is no checker (DIPTYCH_CHECKER)")
        return None
    if _CALLABLE.fullmatch(name) and not Path(name).exists():
        if labels:
            raise ModelError(f"checker_labels: {name} is a callable, and has none")
        return CallableChecker(name, settings.checker_s)
    import torch

    from pipeline import content
    from workers.devices import set_threads

    set_threads(settings, device)
    try:
        return NetworkChecker(content.load(Path(name), torch.device(device), labels), settings.checker_s)
    except ModelError as error:
        raise ModelError(f"checker: {error}") from error


class CheckerStage(JobStage):
    """Judges finished pictures, and does to those that are flagged what the checked job's `checker` says.

    Without a checker, jobs that ask for one, or whose key does, are refused.
    """

    field = "checker"

    def __init__(self, checker: Checker | None = None, action: str = "off") -> None:
        """`action` is what is done where neither key nor request says otherwise."""
        self._checker, self._action = checker, "off" if checker is None else action

    @classmethod
    def open(cls, settings: Settings, device: str) -> Self:
        return cls(load(settings, device), settings.checker_action)

    def close(self) -> None:
        if self._checker is not None:
            self._checker.close()

    def card(self, handler: ImageJobHandler, handlers: Mapping[str, JobHandler]) -> Mapping[str, Any]:
        return {} if self._checker is None else {"checker": self._action}

    def check(self, job: ImageJob, claim: Claim | None) -> ImageJob:
        """`checker` of the job becomes what is done, and it has no previews of what may be hidden."""
        action = action_of(self._action, "" if claim is None else claim.checker, job.checker)
        if self._checker is None and action != "off":
            raise CheckFailed("this worker has no checker, and the request, or its key, asks for one")
        picture = replace(job.picture, preview_every=0) if action in HIDING else job.picture
        return replace(job, picture=picture, checker=action)

    def is_requested(self, job: ImageJob) -> bool:
        return job.checker not in ("", "off")

    def after(self, job: ImageJob, outputs: list[Output], stopped: Callable[[], bool]) -> list[Output]:
        assert self._checker is not None, "such jobs are refused"
        try:
            verdicts = self._checker.verdicts([output.value.image for output in outputs], stopped)
        except Aborted:
            raise
        except Exception as error:
            log.warning("pictures cannot be checked: %s", first_line(error))
            raise CheckFailed(f"a picture could not be checked ({type(error).__name__}), so none is shown") from error
        checked = [self._applied(job.checker, *pair) for pair in zip(outputs, verdicts, strict=True)]
        if all(output.refused for output in checked):
            raise UnsafeImage("every picture was refused by this service's checker")
        return checked

    def _applied(self, action: str, output: Output, verdict: Verdict) -> Output:
        """The output with what the checker says of its picture, and what is done to it."""
        done = action if verdict.flagged else None
        picture = output.value
        if done in _WARNINGS:
            picture = replace(picture, warnings=(*picture.warnings, _WARNINGS[done]))
        if done == "blur":
            from pipeline.content import blurred

            assert self._checker is not None
            fingerprint = {**picture.fingerprint, "blurred": self._checker.digest}
            picture = replace(picture, image=blurred(picture.image), fingerprint=fingerprint)
        content = {"flagged": verdict.flagged, "labels": dict(verdict.labels), "action": done}
        return Output(picture, {**output.facts, "content": content}, refused=done == "refuse")
