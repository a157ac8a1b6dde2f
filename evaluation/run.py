"""A run's folder: its settings, its captions, its images, and one record of each finished image. Survives a killed
process.

    run.json        the request settings, and what generated the images
    captions.json   the captions, in order
    pictures/       the PNGs
    pictures.jsonl  a line for each finished PNG, appended after it is whole: unrecorded images are generated again
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from evaluation import captions as texts
from evaluation.captions import Caption

VERSION = 1
# What must be equal for all images of a run. Other parts of the fingerprint may differ, which is reported.
SAME = ("model", "weights", "precision")


class RunError(ValueError):
    """An unusable run folder. The message names folder, file and line."""


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One finished image. `seconds` are since its session started, on a monotonic clock."""

    index: int
    id: str
    seed: int
    file: str
    sha256: str
    session: int
    seconds: float


class EvaluationRun:
    """One run, as its folder holds it. `drawn_by` is the fingerprint of its first image."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], captions: list[Caption], drawn_by: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.captions = captions
        self.drawn_by = drawn_by
        self.records: dict[int, ImageRecord] = {}

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    @property
    def missing(self) -> list[Caption]:
        """The missing images, in order."""
        return [caption for caption in self.captions if caption.index not in self.records]

    @property
    def sessions(self) -> int:
        return 1 + max((record.session for record in self.records.values()), default=-1)

    def digest(self) -> str:
        """A digest of these images, in this order."""
        joined = "".join(self.records[index].sha256 for index in sorted(self.records))
        return hashlib.sha256(joined.encode()).hexdigest()

    def files(self) -> list[Path]:
        """The finished images' files, in the captions' order."""
        return [self.pictures / self.records[index].file for index in sorted(self.records)]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Open a finished run. Raises `RunError` for any other folder, and for images missing or changed."""
        run = cls.load(folder)
        if run.missing:
            left, counts = len(run.missing), len(run.captions)
            raise RunError(f"{folder}: {left} of {counts} pictures are not drawn; start its `evaluate` again")
        return run

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open a run that may be unfinished. Raises `RunError` for any other folder."""
        try:
            head = json.loads((folder / "run.json").read_text("utf-8"))
            pairs = json.loads((folder / "captions.json").read_text("utf-8"))
            captions = [Caption(index, id, text) for index, (id, text) in enumerate(pairs)]
            version, settings, drawn_by = head["version"], dict(head["settings"]), dict(head["drawn_by"])
        except OSError as error:
            raise RunError(f"{folder} is no run: {error.filename} cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{folder}: run.json or captions.json is damaged ({error})") from None
        if version != VERSION:
            raise RunError(f"{folder}: run.json has version {version}, this program reads {VERSION}")
        if texts.digest(captions) != settings.get("captions_sha256"):
            raise RunError(f"{folder}: captions.json is not what run.json was written with")
        run = cls(folder, settings, captions, drawn_by)
        run._read_records()
        return run

    def _read_records(self) -> None:
        """The records whose image exists and is unchanged. A torn last line, left by a kill, is ignored."""
        try:
            lines = (self.folder / "pictures.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        for number, line in enumerate(lines[:-1], 1):  # the last element is torn, or empty
            try:
                record = ImageRecord(**json.loads(line))
                caption = self.captions[record.index]
            except (ValueError, TypeError, IndexError):
                raise RunError(f"{self.folder}: pictures.jsonl line {number} is no record of this run") from None
            if caption.id != record.id:
                raise RunError(f"{self.folder}: pictures.jsonl line {number} is for {record.id!r}, not {caption.id!r}")
            try:
                data = (self.pictures / record.file).read_bytes()
            except OSError:
                continue
            if hashlib.sha256(data).hexdigest() == record.sha256:
                self.records[record.index] = record

    def speed(self) -> float | None:
        """Images per second while the engine was full, over the longest session; None for fewer than 16 images.

        Counted from the image after which a quarter is done to the one before the last quarter: fewer are in progress
        at both ends.
        """
        sessions: dict[int, list[float]] = {}
        for record in self.records.values():
            sessions.setdefault(record.session, []).append(record.seconds)
        longest = max(sessions, key=lambda session: len(sessions[session]), default=0)
        moments = sorted(sessions.get(longest, []))
        if len(moments) < 16:
            return None
        first, last = len(moments) // 4, 3 * len(moments) // 4
        took = moments[last] - moments[first]
        return (last - first) / took if took > 0 else None


class RunWriter:
    """Draws into a run's folder: a new one, or an interrupted run's. Holds its lock until it is closed."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], captions: list[Caption]) -> None:
        """Raises `RunError` if the run's settings or captions differ, naming the first difference; if another process
        draws into it; and if the folder contains anything but a run.
        """
        requested = dict(settings) | {"captions": len(captions), "captions_sha256": texts.digest(captions)}
        head = folder / "run.json"
        if not head.exists() and folder.exists() and any(p.name != "run.lock" for p in folder.iterdir()):
            raise RunError(f"{folder} contains something other than a run; name an empty folder or a new one")
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / "run.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunError(f"{folder} is being drawn into by another process") from None
        try:
            stored = EvaluationRun.load(folder) if head.exists() else None
            if stored is not None and stored.records:
                known = {name: stored.settings.get(name) for name in requested}
                refuse_differences(f"{folder} holds a run with other settings", known, requested, RunError)
                self.run = stored
            else:  # nothing is drawn: a rejected command must not block a corrected one
                self.run = EvaluationRun(folder, requested, captions, {})
                write_json(folder / "captions.json", [[caption.id, caption.text] for caption in captions])
                self._write_head()
            self._clean()
            self._log = os.open(folder / "pictures.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except BaseException:
            self._lock.release()
            raise

    def check_fingerprint(self, fingerprint: Mapping[str, Any]) -> list[str]:
        """Compare an image's fingerprint with the first one's; returns a sentence for each permitted difference.

        An older version wrote fewer parts: a part that only one of the two has counts as unknown, and is reported as
        such. Raises `RunError` if model, weights or precision differ: those images are not of this run.
        """
        if not self.run.drawn_by:
            self.run.drawn_by = dict(fingerprint)
            self._write_head()
        stored, current = ({name: drawn_by.get(name) for name in SAME} for drawn_by in (self.run.drawn_by, fingerprint))
        refuse_differences(f"{self.run.folder} was drawn by another model", stored, current, RunError)
        names = sorted({*self.run.drawn_by, *fingerprint} - {*SAME})
        unknown: list[str] = []
        if ("version" in self.run.drawn_by) != ("version" in fingerprint):
            unknown = [name for name in names if (name in self.run.drawn_by) != (name in fingerprint)]
        differences = [
            f"pictures differ in {name}: {self.run.drawn_by.get(name)!r} and {fingerprint.get(name)!r}"
            for name in names
            if name not in unknown and self.run.drawn_by.get(name) != fingerprint.get(name)
        ]
        if unknown:
            differences.append(
                f"an older version drew some pictures, whose fingerprints do not hold {', '.join(unknown)}"
            )
        return differences

    def add(self, caption: Caption, seed: int, file: str, png: bytes, *, session: int, seconds: float) -> None:
        """Write an image completely, then its record. Raises OSError, and then neither exists."""
        write(self.run.pictures / file, png)
        record = ImageRecord(
            caption.index, caption.id, seed, file, hashlib.sha256(png).hexdigest(), session, round(seconds, 4)
        )
        append(self._log, asdict(record), self.run.folder / "pictures.jsonl")
        self.run.records[caption.index] = record

    def _write_head(self) -> None:
        head = {"version": VERSION, "settings": self.run.settings, "drawn_by": self.run.drawn_by}
        write_json(self.run.folder / "run.json", head)

    def _clean(self) -> None:
        """Remove what a kill left: half a line, half an image."""
        for partial in self.run.pictures.glob(".*.part"):
            partial.unlink(missing_ok=True)
        log = self.run.folder / "pictures.jsonl"
        if log.exists():
            data = log.read_bytes()
            end = data.rfind(b"\n") + 1
            if end < len(data):
                os.truncate(log, end)

    def close(self) -> None:
        if self._lock.is_locked:
            os.close(self._log)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    partial = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises ValueError for NaN and infinities."""
    write(path, (json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n").encode())


def append(log: int, record: Mapping[str, Any], path: Path) -> None:
    """Append a line of JSON to the open file `log`. Raises OSError where it is not whole."""
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    if os.write(log, line) != len(line):  # the rest would follow half a line
        raise OSError(errno.ENOSPC, "half a line was written", str(path))


def refuse_differences(
    title: str, stored: Mapping[str, Any], requested: Mapping[str, Any], error: type[ValueError]
) -> None:
    """Raise `error` where these settings differ, with the first five that do."""
    differ = [name for name in dict.fromkeys([*requested, *stored]) if stored.get(name) != requested.get(name)]
    if differ:
        differences = (f"{name} is {stored.get(name)!r} there, {requested.get(name)!r} here" for name in differ[:5])
        raise error(f"{title}: {'; '.join(differences)}")
