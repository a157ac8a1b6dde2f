"""Checks the content of finished pictures before anything of them is encoded: tags, blurs or refuses what is flagged.

The checker is a network's folder or a callable; without the setting there is none.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from contract.content import read_labels
from pipeline.checkpoints.folder import ModelError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from core.config import Settings
    from pipeline.content import ContentNetwork, Verdict
    from pipeline.pixels.picture import Picture

log = logging.getLogger(__name__)

_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NO_LABELS: tuple[str, ...] = ()
_MOST = 16  # pictures in one forward on a GPU
_WARNINGS = {
    "blur": "the picture is blurred, by this service's checker",
    "refuse": "the picture was refused by this service's checker",
}


class UnsafeImage(Exception):
    """All images of a job were refused."""


class CheckFailed(Exception):
    """Images could not be checked, so that none may be shown. The message is for the client."""


class Checker(Protocol):
    """A checker of contents. Thread-safe. `digest` identifies its files; `labels` flag pictures, if it has some."""

    @property
    def digest(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    def verdicts(self, images: Sequence[Image]) -> list[Verdict]:
        """Judge pictures in RGB, in order. Raises any error: then nothing is known of them."""
        ...

    def close(self) -> None: ...


class Checked(NamedTuple):
    """A picture that may be shown, if any, and what results tell of its check."""

    picture: Picture | None
    content: dict[str, Any] | None
    warnings: tuple[str, ...] = ()


class CallableChecker:
    """A callable that gets a picture and returns whether it is fine. Called on several threads at once."""

    def __init__(self, name: str) -> None:
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

    def verdicts(self, images: Sequence[Image]) -> list[Verdict]:
        from pipeline.content import Verdict

        return [Verdict(not self._function(image.copy()), {}) for image in images]

    def close(self) -> None:
        pass


class NetworkChecker:
    """A network on a thread of its own. On a GPU it judges all pictures that wait together; on a CPU, where that saves
    nothing, one after another, so that a score depends on nothing else.
    """

    def __init__(self, network: ContentNetwork, most: int = 0) -> None:
        """`most` pictures go into a forward; 0: as many as the network's device has a use for."""
        self._network, self.digest, self.labels = network, network.digest, network.labels
        self._most = most or (_MOST if network.device.type == "cuda" else 1)
        self._waiting: deque[tuple[Tensor, Future[Verdict]]] = deque()
        # One thread: OpenMP keeps a team of threads for every thread that computes.
        self._thread = ThreadPoolExecutor(1, "checker")

    def verdicts(self, images: Sequence[Image]) -> list[Verdict]:
        items = [(self._network.prepare(image), Future[Any]()) for image in images]
        self._waiting.extend(items)
        for _ in items:
            self._thread.submit(self._judge)  # of which the first may take all
        return [verdict.result() for _, verdict in items]

    def _judge(self) -> None:
        items: list[tuple[Tensor, Future[Verdict]]] = []
        with suppress(IndexError):
            while len(items) < self._most:
                items.append(self._waiting.popleft())
        if not self._settle(items) and items:  # one of them may be the cause, or their number
            for item in items:
                self._settle([item], last=True)

    def _settle(self, items: Sequence[tuple[Tensor, Future[Verdict]]], *, last: bool = False) -> bool:
        """Give these pictures their verdicts. False: they have none; if it is the `last` try they have the error."""
        import torch

        try:
            verdicts = self._network.verdicts(torch.stack([pixels for pixels, _ in items])) if items else []
        except BaseException as error:  # whoever waits has to hear of it
            for _, verdict in items if last else ():
                verdict.set_exception(error)
            return False
        for (_, verdict), value in zip(items, verdicts, strict=True):
            verdict.set_result(value)
        return True

    def close(self) -> None:
        self._thread.shutdown()


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
        return CallableChecker(name)
    import torch

    from pipeline import content
    from workers.devices import set_threads

    set_threads(settings, device)
    try:
        return NetworkChecker(content.load(Path(name), torch.device(device), labels))
    except ModelError as error:
        raise ModelError(f"checker: {error}") from error


def require(checker: Checker | None, action: str) -> None:
    """Raise `CheckFailed` for an action that needs a checker where there is none."""
    if checker is None and action != "off":
        raise CheckFailed("this worker has no checker, and the request, or its key, asks for one")


def check(checker: Checker | None, action: str, pictures: Sequence[Picture]) -> list[Checked]:
    """Check pictures and do to those that are flagged what `action` says, in order.

    Raises `UnsafeImage` if all are refused, and `CheckFailed` if one cannot be checked: then none may be shown.
    """
    require(checker, action)
    if checker is None or action == "off":
        return [Checked(picture, None, picture.warnings) for picture in pictures]
    try:
        verdicts = checker.verdicts([picture.image for picture in pictures])
    except Exception as error:
        log.warning("pictures cannot be checked: %s", first_line(error))
        raise CheckFailed(f"a picture could not be checked ({type(error).__name__}), so none is shown") from error
    checked = [_applied(checker, action, *pair) for pair in zip(pictures, verdicts, strict=True)]
    if not any(each.picture for each in checked):
        raise UnsafeImage
    return checked


def _applied(checker: Checker, action: str, picture: Picture, verdict: Verdict) -> Checked:
    content = {
        "flagged": verdict.flagged,
        "labels": dict(verdict.labels),
        "action": action if verdict.flagged else None,
    }
    warnings = picture.warnings
    if verdict.flagged and action in _WARNINGS:
        from pipeline.content import blurred

        warnings = (*warnings, _WARNINGS[action])
        if action == "refuse":
            return Checked(None, content, warnings)
        fingerprint = {**picture.fingerprint, "blurred": checker.digest}
        picture = replace(picture, image=blurred(picture.image), fingerprint=fingerprint, warnings=warnings)
    return Checked(picture, content, warnings)
