"""Keeps what was read of files that requests name within a budget: those in use are pinned, others stay by last use."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from core.threads import lower_priority, started
from pipeline.checkpoints.folder import ModelError

T = TypeVar("T")
_MOST_FAILURES = 1_000  # files that cannot be used, and are remembered


class ReadFile(NamedTuple, Generic[T]):
    """What was read of a file, as requests use it, and what that takes. `digest` identifies the file."""

    content: T
    digest: str
    size_bytes: int


@dataclass(slots=True, eq=False)
class PinnedFile(Generic[T]):
    """A file as last read."""

    name: str
    stamp: Hashable
    digest: str
    size_bytes: int
    content: T | None  # None: evicted
    pins: int = 0  # requests that use it
    error: ModelError | None = None  # of the last attempt to read it again


class PinnedCache(Generic[T]):
    """Thread-safe. Files are read by threads of low priority, so that iterations of other requests go on.

    One that cannot be used is not read again until it changes.
    """

    def __init__(
        self,
        what: str,
        capacity_bytes: int,
        read: Callable[[str], ReadFile[T]],
        *,
        check: Callable[[str], None] = lambda name: None,
        at_once: int = 1,
    ) -> None:
        """`what` the files are begins messages. `capacity_bytes` limits all contents, including those in use: one that
        is larger is not kept. `check` reads a name's header, and `read` its content; both raise `ModelError`. So many
        are read `at_once`.

        `check` runs at normal priority: where Python itself is busy all threads wait for it, also while processes that
        go before it keep it from running.
        """
        self.capacity_bytes = capacity_bytes
        self.reads = 0
        self._what = what
        self._check = check
        self._read = read
        self._failures: OrderedDict[str, tuple[Hashable, str]] = OrderedDict()  # by name: stamp and message
        self._files: OrderedDict[str, PinnedFile[T]] = OrderedDict()
        self._loads: dict[tuple[str, Hashable], Future[PinnedFile[T]]] = {}  # under way
        self._awaited: list[PinnedFile[T]] = []  # of the request that is admitted next
        self._pinned_bytes = 0
        self._lock = threading.Lock()
        self._places = threading.Semaphore(at_once)

    def find(self, name: str, stamp: Hashable) -> PinnedFile[T]:
        """The file's current content, read if its `stamp` has changed or it was evicted. Raises `ModelError`."""
        with self._lock:
            known = self._files.get(name)
            if known is not None and known.stamp == stamp and (known.content is not None or self._is_too_large(known)):
                self._files.move_to_end(name)
                return known
            if (failure := self._failures.get(name)) is not None and failure[0] == stamp:
                raise ModelError(failure[1])
            load = self._load(name, stamp)
        return load.result()

    def take(self, names: Sequence[str], *, wait: bool) -> list[PinnedFile[T]] | None:
        """Reserve files that were found before; None means not yet: other requests' fill the memory.

        Reads no file itself. With `wait` None may also mean that one is read again, which was evicted; without,
        `content` waits for it.
        """
        with self._lock:
            wanted = [self._files[name] for name in names]
            self._awaited = []
            more = sum(file.size_bytes for file in wanted if not file.pins)
            if self._pinned_bytes and self._pinned_bytes + more > self.capacity_bytes:
                return None
            gone = [file for file in wanted if file.content is None and file.error is None]
            for file in gone:
                self._load(file.name, file.stamp)
            if gone and wait:
                self._awaited = wanted
                return None
            self._pinned_bytes += more
            for file in wanted:
                file.pins += 1
            return wanted

    def give(self, files: Sequence[PinnedFile[T]], *, keep: bool = False) -> None:
        """Release them after the request has ended; with `keep`, since it has to wait for something else: they are not
        evicted before the next `take`.
        """
        with self._lock:
            if keep:
                self._awaited = list(files)
            for file in files:
                file.pins -= 1
                if not file.pins:
                    self._pinned_bytes -= file.size_bytes
            evicted = self._evict()
        if evicted:  # freed elsewhere: this is the engine's thread
            thread = threading.Thread(target=evicted.clear, name="evicted", daemon=True)
            if not started(thread):
                evicted.clear()

    def content(self, file: PinnedFile[T]) -> T:
        """What requests use of a taken file. Raises `ModelError` if it was evicted and cannot be read again."""
        with self._lock:
            load = self._load(file.name, file.stamp) if file.content is None and file.error is None else None
        if load is not None:
            load.result()
        with self._lock:
            found, error = file.content, file.error
        if found is None:
            raise error or ModelError(f"{self._what} {file.name}: its file changed before it was used; ask again")
        return found

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of the contents, by name, least recently used first."""
        with self._lock:
            return {name: file.size_bytes for name, file in self._files.items() if file.content is not None}

    def _load(self, name: str, stamp: Hashable) -> Future[PinnedFile[T]]:
        """Begin to read a file unless that is under way. Under the lock."""
        key = (name, stamp)
        if key not in self._loads:
            load = Future[PinnedFile[T]]()
            # Ends rather than waits for the next: a thread that computed keeps a team of OpenMP threads (see Lane).
            thread = threading.Thread(target=self._run, args=(key, load), name=f"{self._what} {name}", daemon=True)
            thread.start()
            self._loads[key] = load  # last: were the thread not started, it would be awaited for ever
        return self._loads[key]

    def _run(self, key: tuple[str, Hashable], load: Future[PinnedFile[T]]) -> None:
        name, stamp = key
        try:
            with self._places:
                self.reads += 1
                self._check(name)
                lower_priority("reading weight files", idle=True)
                read = self._read(name)
            with self._lock:
                made, evicted = self._keep(name, stamp, read)
            del evicted  # not under the lock, which the engine's thread waits for
        except BaseException as error:
            failure = error if isinstance(error, ModelError) else ModelError(f"{self._what} {name}: {error}")
            with self._lock:
                del self._loads[key]
                if failure is error and failure.lasting:
                    self._failures[name] = stamp, str(failure)
                    self._failures.move_to_end(name)
                    if len(self._failures) > _MOST_FAILURES:
                        self._failures.popitem(last=False)
                if (known := self._files.get(name)) is not None and known.content is None:
                    known.error = ModelError(str(failure))  # without a traceback, which would keep what was read
            load.set_exception(error)
        else:
            load.set_result(made)

    def _keep(self, name: str, stamp: Hashable, read: ReadFile[T]) -> tuple[PinnedFile[T], list[T]]:
        """The file with this content, and what was evicted for it. Under the lock."""
        del self._loads[name, stamp]
        file = self._files.get(name)
        if file is None or (file.stamp, file.digest) != (stamp, read.digest):
            file = self._files[name] = PinnedFile(name, stamp, read.digest, read.size_bytes, None)
        if self._is_too_large(file):
            file.error = ModelError(f"{self._what} {name}: needs more than the {self.capacity_bytes} bytes there are")
        elif file.content is None:
            file.content, file.error = read.content, None
        self._files.move_to_end(name)
        return file, self._evict(but=file)

    def _is_too_large(self, file: PinnedFile[T]) -> bool:
        return file.size_bytes > self.capacity_bytes

    def _evict(self, but: PinnedFile[T] | None = None) -> list[T]:
        """Evict least recently used files that nobody uses, as far as needed. Under the lock."""
        evicted: list[T] = []
        held = sum(file.size_bytes for file in self._files.values() if file.content is not None)
        for file in list(self._files.values()):
            if held <= self.capacity_bytes:
                break
            if file.content is not None and not file.pins and file not in self._awaited and file is not but:
                evicted.append(file.content)
                file.content = None
                held -= file.size_bytes
        return evicted
