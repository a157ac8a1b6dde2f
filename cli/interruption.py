"""Signals that stop a command: SIGINT and SIGTERM interrupt its main thread, and no library can lose that.

A KeyboardInterrupt is raised wherever the main thread is, which may be in a destructor or a callback, where Python
drops every exception, or in a library that takes it for an error of its own. So a thread repeats it until it is being
handled, and ends the process where nothing helps. It is not raised while modules are imported, but after that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

from core.threads import exit_process

_ECHO_S = 0.5  # one Ctrl-C may arrive twice: from the terminal, and from the parent process
_LOOK_S = 0.1
_LOST = (
    4  # looks in turn that saw no KeyboardInterrupt: between two frames none is being handled either, for microseconds
)
_PATIENCE_S = 30.0  # for a command to stop: an iteration of a large model on a CPU takes seconds, and so do imports


class Interruption:
    """The first SIGINT or SIGTERM raises KeyboardInterrupt in the main thread; the second ends the process at once.

    Of a command that replaces the handlers, such as a service, the signals are its own.
    """

    def __init__(self, *, stopped_by_sigterm: int) -> None:
        """`stopped_by_sigterm` is the exit code of a command that SIGTERM stops."""
        self.signal: int | None = None  # the first one
        self._codes = {signal.SIGINT: 130, signal.SIGTERM: stopped_by_sigterm}
        self._last = 0.0
        self._deferred = self._repeated = False
        self._handled = threading.Event()
        self._arrived, self._wake = os.pipe()

    @property
    def exit_code(self) -> int:
        return self._codes[signal.Signals(self.signal)] if self.signal is not None else 0

    def install(self) -> None:
        """Take the signals, in the main thread."""
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)  # Python's handlers wait for a call into C to end
        for number in self._codes:
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:  # as behind a shell's `&`
                signal.signal(number, self._interrupt)
        sys.unraisablehook = _forget_interrupts
        mask = signal.pthread_sigmask
        os.register_at_fork(
            before=lambda: mask(signal.SIG_BLOCK, self._codes),  # what the child gets is not this process's
            after_in_parent=lambda: mask(signal.SIG_UNBLOCK, self._codes),
            after_in_child=self._leave,
        )
        threading.Thread(target=self._see_to_it, name="interruption", daemon=True).start()

    def handled(self) -> None:
        """Tell that the main thread has stopped what it did."""
        self._handled.set()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._handled.is_set():
            return
        now = time.monotonic()
        if self._repeated:
            self._repeated = False
        elif self.signal is None:
            self.signal, self._last = number, now
        elif now - self._last < _ECHO_S:
            return
        else:
            self._end()
        self._deferred = _imports(frame)
        if not self._deferred:
            raise KeyboardInterrupt

    def _see_to_it(self) -> None:
        number = self._next()
        until, lost = time.monotonic() + _PATIENCE_S, 0
        while not self._handled.wait(_LOOK_S):
            if time.monotonic() >= until:
                self.signal = self.signal or number
                self._end()
            lost = 0 if self.signal is None or _is_interrupted() else lost + 1
            if lost and (self._deferred or lost == _LOST):
                lost, self._repeated = 0, True
                signal.pthread_kill(_main_thread(), number)

    def _next(self) -> int:
        """Wait for a signal whose handler is this object's."""
        while True:
            number = os.read(self._arrived, 1)[0]
            if number in self._codes and signal.getsignal(number) == self._interrupt:
                return number

    def _end(self) -> None:
        print("stopped", file=sys.stderr)
        exit_process(self.exit_code)

    def _leave(self) -> None:
        """Let a forked process have its own signals."""
        signal.set_wakeup_fd(-1)
        for number in self._codes:
            if signal.getsignal(number) == self._interrupt:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._codes)


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported: what C++ does then, as torch's, aborts the process at an exception."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _is_interrupted() -> bool:
    """Return whether the main thread handles a KeyboardInterrupt, or an exception that it was turned into."""
    current = sys._current_exceptions().get(_main_thread())
    error = current[1] if isinstance(current, tuple) else current  # as of Python 3.12
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _forget_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
    """Print no KeyboardInterrupt that was raised where Python drops it."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
