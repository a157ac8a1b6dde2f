"""A prompts file under construction: its finished rows in order, and the manifest beside it. Survives a killed process.

Files:

    captions.tsv        id, caption, seed, and the subject where known; exists when all are finished
    captions.tsv.json   the request settings, what wrote them, how often each was retried and why
    captions.tsv.part   until then: a line for the request, and one for each row, appended when it is final
    captions.tsv.lock   held while they are written: no second process may
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from evaluation import captions as tables
from evaluation.run import append, refuse_differences, write, write_json

VERSION = 1


class CaptionFileError(ValueError):
    """A prompts file that cannot be written. The message names it."""


@dataclass(frozen=True, slots=True)
class CaptionRow:
    """A finished row. `caption` None: none of its attempts was valid. `again` counts the others by reason."""

    index: int
    caption: str | None
    seed: int
    subject: str
    tokens: int  # of the image model
    again: dict[str, int] = field(default_factory=dict)


class CaptionFile:
    """One prompts file. Open it, `begin` it when the author is known, `add` rows in order, `finish` it."""

    def __init__(self, out: Path, settings: Mapping[str, Any], count: int) -> None:
        """Raises `CaptionFileError` if `out` contains something else, or a partial file with other settings."""
        self.out = out
        self.count = count
        self.settings = dict(settings) | {"count": count}
        self.written_by: dict[str, Any] = {}
        self.rows: list[CaptionRow] = []
        self.finished = False
        self._log: int | None = None
        out.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._beside(".lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise CaptionFileError(f"{out} is being written by another process") from None
        try:
            self._look()
        except BaseException:
            self.close()
            raise

    @property
    def part(self) -> Path:
        """The file of finished rows, until all are finished."""
        return self._beside(".part")

    @property
    def manifest(self) -> Path:
        return self._beside(".json")

    @property
    def made(self) -> int:
        return sum(row.caption is not None for row in self.rows)

    @property
    def again(self) -> Counter[str]:
        """The number of invalid attempts, by reason."""
        return sum((Counter(row.again) for row in self.rows), Counter())

    def _beside(self, suffix: str) -> Path:
        return self.out.with_name(self.out.name + suffix)

    # -- opening -------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self.out.exists():
            head = self._vouched()
            refuse_differences(
                f"{self.out} holds captions of other settings; name another file", head, self.settings, CaptionFileError
            )
            self.finished = True
            self.part.unlink(missing_ok=True)  # of a process that was killed at its very end
            return
        try:
            data = self.part.read_bytes()
        except FileNotFoundError:
            return
        lines = data.split(b"\n")[:-1]  # the last element is torn, or empty
        if not lines:
            return
        head = _read_head(self.part, lines[0])
        self.rows = [_read_row(self.part, number, line) for number, line in enumerate(lines[1:])]
        if not self.made:  # a command that wrote nothing must not block a corrected one
            self.rows = []
            return
        title = f"{self.part} is a beginning of other settings; remove it, or name another file"
        refuse_differences(title, head["settings"], self.settings, CaptionFileError)
        self.written_by = head["written_by"]
        os.truncate(self.part, data.rfind(b"\n") + 1)

    def _vouched(self) -> dict[str, Any]:
        """The settings of the finished file. Raises `CaptionFileError` if its manifest does not match it."""
        try:
            head = json.loads(self.manifest.read_text("utf-8"))
            settings, digest = dict(head["settings"]), head["sha256"]
            file_digest = hashlib.sha256(self.out.read_bytes()).hexdigest()
            self.rows = [CaptionRow(**row) for row in head["rows"]]
            self.written_by = head["written_by"]
        except FileNotFoundError:
            raise CaptionFileError(f"{self.out} is there, and was not written by this command; name another") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CaptionFileError(f"{self.manifest} is damaged ({error}); name another file") from None
        if digest != file_digest:
            raise CaptionFileError(f"{self.out} was changed after it was written; name another file")
        return settings

    # -- writing -------------------------------------------------------------------------------------------------------

    def begin(self, written_by: Mapping[str, Any]) -> None:
        """Record the author. Raises `CaptionFileError` if another one wrote the existing rows."""
        if self.rows:
            refuse_differences(
                f"{self.part} was written by another model; remove it", self.written_by, written_by, CaptionFileError
            )
        else:
            self.written_by = dict(written_by)
            head = {"version": VERSION, "settings": self.settings, "written_by": self.written_by}
            write(self.part, (json.dumps(head, ensure_ascii=False) + "\n").encode())
        self._log = os.open(self.part, os.O_WRONLY | os.O_APPEND)

    def add(self, row: CaptionRow) -> None:
        """Append the next row. Raises OSError, and then it is not there."""
        assert self._log is not None and row.index == len(self.rows), "begun, and rows in their order"
        append(self._log, asdict(row), self.part)
        self.rows.append(row)

    def finish(self) -> None:
        """Write the table and its manifest, of all rows. In an order in which a kill loses nothing."""
        assert len(self.rows) == self.count
        has_subjects = any(row.subject for row in self.rows)
        cells = [
            (f"{row.index:05d}", row.caption, str(row.seed), *((row.subject,) if has_subjects else ()))
            for row in self.rows
            if row.caption is not None
        ]
        data = tables.render(("id", "caption", "seed", *(("subject",) if has_subjects else ())), cells)
        header = {"version": VERSION, "settings": self.settings, "written_by": self.written_by}
        counted = {"captions": self.made, "missing": [row.index for row in self.rows if row.caption is None]}
        footer = {"again": dict(self.again), "sha256": hashlib.sha256(data).hexdigest()}
        write_json(self.manifest, header | counted | footer | {"rows": [asdict(row) for row in self.rows]})
        write(self.out, data)
        self.part.unlink()
        self.finished = True

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None
        if self._lock.is_locked:
            if self.finished or not self.part.exists():  # a process that finds the lock held gives up
                self._beside(".lock").unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_head(part: Path, line: bytes) -> dict[str, Any]:
    try:
        head = json.loads(line)
        version, _, _ = head["version"], dict(head["settings"]), dict(head["written_by"])
    except (ValueError, KeyError, TypeError):
        raise CaptionFileError(f"{part}: line 1 is no head of such a file; remove it") from None
    if version != VERSION:
        raise CaptionFileError(f"{part}: has version {version}, this program reads {VERSION}; remove it")
    return dict(head)


def _read_row(part: Path, index: int, line: bytes) -> CaptionRow:
    try:
        row = CaptionRow(**json.loads(line))
        if row.index == index:
            return row
    except (ValueError, TypeError):
        pass
    raise CaptionFileError(f"{part}: line {index + 2} is not row {index}; remove the file")
