"""Keeps what was read of files that requests name within a budget: those in use are pinned, others stay by last use."""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from core.threads import lower_priority, started
from pipeline.checkpoints.folder import ModelError

log = logging.getLogger(__name__)

T = TypeVar("T")
_MOST_FAILURES = 1_000  # files that cannot be used, and are remembered


class ReadFile(NamedTuple, Generic[T]):
    """The content of a file, as requests use it, and its size. `digest` identifies the file; `facts` are known
    of it also while its content is evicted.
    """

    content: T
    digest: str
    size_bytes: int
    facts: Any = None


@dataclass(slots=True, eq=False)
class Asset(Generic[T]):
    """A file as last read."""

    key: Hashable
    stamp: Hashable
    digest: str
    size_bytes: int
    content: T | None  # None: evicted
    facts: Any = None
    pins: int = 0  # requests that use it
    error: BaseException | None = None  # of the last attempt to read it again

    @property
    def name(self) -> str:
        return str(self.key)


class AssetCache(Generic[T]):
    """Thread-safe. Files are read by threads of low priority, so that iterations of other requests go on.

    One that cannot be used is not read again until it changes.
    """

    def __init__(
        self,
        kind: str,
        capacity: int,
        read: Callable[[Any], ReadFile[T]],
        *,
        check: Callable[[Any], object] = lambda key: None,
        free: Callable[[list[T]], object] = list.clear,
        loaded: Callable[[], object] = lambda: None,
        at_once: int = 1,
    ) -> None:
        """`kind` of the files begins messages. `capacity` limits the sizes of all contents, including those in use: one
        that is larger is not kept. `check` reads a key's header, and `read` its content; both raise `ModelError`.
        `free` releases evicted contents and empties their list. `loaded` is called, on any thread, after each read,
        whether it succeeded or not. So many are read `at_once`.

        `check` runs at normal priority: where Python itself is busy all threads wait for it, also while processes that
        go before it keep it from running.
        """
        self.capacity = capacity
        self.reads = 0
        self._kind = kind
        self._check = check
        self._read = read
        self._free = free
        self._loaded = loaded
        self._failures: OrderedDict[Hashable, tuple[Hashable, ModelError]] = OrderedDict()  # by key, with stamps
        self._files: OrderedDict[Hashable, Asset[T]] = OrderedDict()
        self._loads: dict[tuple[Hashable, Hashable], Future[tuple[Asset[T], T]]] = {}  # under way
        self._evicted: list[T] = []  # for what is being read, and not freed yet
        self._awaited: list[Asset[T]] = []  # of the request that is admitted next
        self._pinned = 0  # size of all that are in use
        self._lock = threading.Lock()
        self._places = threading.Semaphore(at_once)

    def find(self, key: Hashable, stamp: Hashable) -> Asset[T]:
        """The file's current content, read if its `stamp` has changed or it was evicted. Raises `ModelError`."""
        return self._find(key, stamp)[0]

    def get(self, key: Hashable, stamp: Hashable) -> T:
        """The same for callers that keep the content themselves, whatever is evicted."""
        asset, content = self._find(key, stamp)
        if content is None:
            raise self._too_large(asset)
        return content

    def known(self, key: Hashable) -> Asset[T]:
        """Return a file that was found before, as last read."""
        return self._files[key]

    def take(self, keys: Sequence[Hashable], *, wait: bool) -> list[Asset[T]] | None:
        """Reserve files that were found before; None means not yet: other requests' fill the memory.

        Reads no file itself. With `wait` None may also mean that one is read again, which was evicted; without,
        `content` waits for it.
        """
        with self._lock:
            assets = [self._files[key] for key in keys]
            self._awaited = []
            more = sum(asset.size_bytes for asset in assets if not asset.pins)
            if self._pinned and self._pinned + more > self.capacity:
                return None
            absent = [asset for asset in assets if asset.content is None and asset.error is None]
            if absent:
                self._awaited = assets
                self._evicted += self._evict(room=sum(asset.size_bytes for asset in absent))
                for asset in absent:
                    self._load(asset.key, asset.stamp)  # which frees them first
                if wait:
                    return None
                self._awaited = []
            self._pinned += more
            for asset in assets:
                asset.pins += 1
                self._files.move_to_end(asset.key)
            return assets

    def give(self, assets: Sequence[Asset[T]], *, keep: bool = False) -> None:
        """Release them after the request has ended; with `keep`, since it has to wait for something else: they are not
        evicted before the next `take`.
        """
        with self._lock:
            if keep:
                self._awaited = list(assets)
            for asset in assets:
                asset.pins -= 1
                if not asset.pins:
                    self._pinned -= asset.size_bytes
            evicted = self._evict()
        if evicted:  # freed elsewhere: this is the engine's thread
            thread = threading.Thread(target=self._release, args=(evicted,), name="evicted", daemon=True)
            if not started(thread):
                self._release(evicted)

    def content(self, asset: Asset[T]) -> T:
        """Return what requests use of a taken file. Raises why it cannot be read again, if it was evicted."""
        with self._lock:
            load = self._load(asset.key, asset.stamp) if asset.content is None and asset.error is None else None
        if load is not None:
            load.result()
        with self._lock:
            content, error = asset.content, asset.error
        if content is None:
            raise error or ModelError(f"{asset.name}: its file changed before it was used; ask again", kind=self._kind)
        return content

    def resident(self, key: Hashable) -> T | None:
        """Return the content of a file that is in memory."""
        asset = self._files.get(key)
        return None if asset is None else asset.content

    def loading(self, key: Hashable) -> bool:
        """Return whether a file is being read."""
        with self._lock:
            return any(loading == key for loading, _ in self._loads)

    def evict(self, keys: Iterable[Hashable]) -> None:
        """Evict files that nobody uses."""
        with self._lock:
            evicted = [content for key in keys if (content := self._drop(self._files[key])) is not None]
        self._release(evicted)

    def make_room(self, size_bytes: int) -> None:
        """Evict least recently used files that nobody uses until so much is free."""
        with self._lock:
            evicted = self._evict(room=size_bytes)
        self._release(evicted)

    @property
    def held(self) -> Mapping[Hashable, int]:
        """Sizes of the contents, by key, least recently used first."""
        with self._lock:
            return {key: asset.size_bytes for key, asset in self._files.items() if asset.content is not None}

    def _find(self, key: Hashable, stamp: Hashable) -> tuple[Asset[T], T | None]:
        with self._lock:
            asset = self._files.get(key)
            if asset is not None and asset.stamp == stamp and (asset.content is not None or self._exceeds(asset)):
                self._files.move_to_end(key)
                return asset, asset.content
            if (failure := self._failures.get(key)) is not None and failure[0] == stamp:
                raise failure[1].without_traceback()
            load = self._load(key, stamp)
        return load.result()

    def _load(self, key: Hashable, stamp: Hashable) -> Future[tuple[Asset[T], T]]:
        """Begin to read a file unless that is under way. Under the lock."""
        if (key, stamp) not in self._loads:
            load = Future[tuple[Asset[T], T]]()
            # Ends rather than waits for the next: a thread that computed keeps a team of OpenMP threads (see Lane).
            name = f"{self._kind} {key}"
            thread = threading.Thread(target=self._run, args=(key, stamp, load), name=name, daemon=True)
            thread.start()
            self._loads[key, stamp] = load  # last: were the thread not started, it would be awaited for ever
        return self._loads[key, stamp]

    def _run(self, key: Hashable, stamp: Hashable, load: Future[tuple[Asset[T], T]]) -> None:
        try:
            with self._places:
                with self._lock:
                    evicted, self._evicted = self._evicted, []
                self._release(evicted)
                self.reads += 1
                self._check(key)
                lower_priority("reading weight files", idle=True)
                read = self._read(key)
            with self._lock:
                asset, evicted = self._keep(key, stamp, read)
        except BaseException as error:
            # Without its traceback, whose frames hold what was read. One that is not of the file stays what it is.
            own = error if isinstance(error, ModelError) else None
            failure = copy.copy(error) if own is None else own.without_traceback()
            with self._lock:
                del self._loads[key, stamp]
                if own is not None and own.lasting:
                    self._failures[key] = stamp, own.without_traceback()
                    self._failures.move_to_end(key)
                    if len(self._failures) > _MOST_FAILURES:
                        self._failures.popitem(last=False)
                if (known := self._files.get(key)) is not None and known.content is None:
                    known.error = failure
            load.set_exception(error)
        else:
            load.set_result((asset, read.content))
            del read, load
            self._release(evicted)
        finally:
            self._loaded()

    def _keep(self, key: Hashable, stamp: Hashable, read: ReadFile[T]) -> tuple[Asset[T], list[T]]:
        """The file with this content, and what was evicted for it. Under the lock."""
        del self._loads[key, stamp]
        asset = self._files.get(key)
        if asset is None or (asset.stamp, asset.digest) != (stamp, read.digest):
            asset = self._files[key] = Asset(key, stamp, read.digest, read.size_bytes, None, read.facts)
        if self._exceeds(asset):
            asset.error = self._too_large(asset)
        elif asset.content is None:
            asset.content, asset.error = read.content, None
        self._files.move_to_end(key)
        return asset, self._evict(but=asset)

    def _exceeds(self, asset: Asset[T]) -> bool:
        return asset.size_bytes > self.capacity

    def _too_large(self, asset: Asset[T]) -> ModelError:
        return ModelError(f"{asset.name}: needs more than the {self.capacity} bytes there are", kind=self._kind)

    def _evict(self, but: Asset[T] | None = None, room: int = 0) -> list[T]:
        """Evict least recently used files that nobody uses, as far as `room` needs it. Under the lock."""
        evicted: list[T] = []
        held = sum(asset.size_bytes for asset in self._files.values() if asset.content is not None)
        for asset in list(self._files.values()):
            if held + room <= self.capacity:
                break
            if asset is not but and (content := self._drop(asset)) is not None:
                evicted.append(content)
                held -= asset.size_bytes
        return evicted

    def _drop(self, asset: Asset[T]) -> T | None:
        """Take the content from a file that nobody uses; None where there is none, or somebody does. Under the lock."""
        if asset.pins or asset in self._awaited:
            return None
        content, asset.content = asset.content, None
        return content

    def _release(self, evicted: list[T]) -> None:
        """Free evicted contents. Not under the lock, which the engine's thread waits for."""
        try:
            self._free(evicted)
        except Exception:
            log.exception("evicted files of kind %s could not be freed", self._kind)
