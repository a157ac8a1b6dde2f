"""Sets up and tears down every service of these tests: a guard, logs after failures, and a clean end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from tests.faults.guard import Guard
from tests.faults.parts import Part


class Site(ABC):
    """Starts on `with`, and leaves nothing behind, however that ends."""

    parts: list[Part]
    guard: Guard
    _closing: list[Any]

    def __enter__(self) -> Self:
        self.guard = Guard()
        self._closing = []
        try:
            self._start()
        except BaseException as error:
            error.add_note(self.logs())
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(self.logs())
        self.close()

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """End everything, without asking; also what has only begun to start."""

    def logs(self) -> str:
        """The end of what each part has said."""
        return "\n".join(part.tail() for part in getattr(self, "parts", ()))
