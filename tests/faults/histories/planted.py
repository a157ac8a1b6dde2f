"""Injects bugs that the checker must find into the processes of a history.

    BUG=file python -m tests.faults.histories.planted api FD | worker …

The file names the active bugs. Some replace parts of the scripts' text: if the product no longer contains that part,
the process exits, so that no bug is silently missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from core.jobs import connection
from core.jobs.connection import RedisClient, Script
from core.jobs.rates import LIMITS
from core.jobs.scripts import load

FENCING, SWEEP, LINK = "fencing-off", "sweep-off", "link-without-artifact"
AFTER, LOST, OTHERS = "event-after-end", "lost-write", "others-bytes"
FILES, JOBS, BATCHES, HINT, OPEN = "files-of-others", "jobs-of-others", "batches-of-others", "forbidden", "without-key"
SHARE, QUOTA, EXCESS, RATE = "share-never-shrinks", "quota-never-shrinks", "quota-off", "rate-never-returns"
TURN, MEMORY, DESCRIPTORS = "turn-kept", "memory-kept", "descriptors-kept"
REQUEST, BYTES, LARGER = "request-kept", "bytes-not-counted", "larger-than-quota"
FORGETS, LATE, UNNAMED = "requeue-without-tenant", "late-hand-back", "artifact-given-up"
IDS, LINES = "one-space-of-ids", "lines-of-others"
BUGS = (
    FENCING, SWEEP, LINK, AFTER, LOST, OTHERS, FILES, JOBS, BATCHES, HINT, OPEN, SHARE, QUOTA, EXCESS, RATE, TURN,
    MEMORY, DESCRIPTORS, REQUEST, BYTES, LARGER, FORGETS, LATE, UNNAMED, IDS, LINES,
)  # fmt: skip
_KEPT_BYTES = 2**20  # of each call and picture


def bugs() -> frozenset[str]:
    """Those that are in now."""
    try:
        return frozenset(Path(os.environ["BUG"]).read_text().split())
    except OSError:
        return frozenset()


def _changed(text: str, pattern: str, new: str) -> str:
    changed, count = re.subn(pattern, new, text)
    if not count:
        sys.exit(f"planted: no script holds {pattern!r} any more")
    return changed


def _edits() -> dict[str, list[tuple[str, str, str]]]:
    """Each script's text → what bugs change in it: the bug, a pattern, and what takes its place."""
    names = ("report", "renew", "finish", "claim", "cancel", "erase", "sweep", "hand_back")
    text = {name: load(f"jobs/{name}") for name in names}
    text |= {"create": load("jobs/create", LIMITS), "forget": load("files/forget")}
    # Whether it is the attempt that runs which writes.
    holds = r" and (job\.attempt == ARGV\[i \+ 1\]|holds\(job, ARGV\[i \+ 1\]\))"
    ended = r" or (job\.attempt ~= ARGV\[3\]|not holds\(job, ARGV\[3\]\))"
    job = "job" if "emit(job, " in text["finish"] else "job.id"
    after = f"  emit({job}, 'progress', '{{\"steps_done\":1}}')\n\\1"
    edits = {
        "report": [(FENCING, holds, "")],
        "renew": [(FENCING, r" and job\.worker == ARGV\[2\]" + holds, "")],
        "finish": [(FENCING, ended, ""), (AFTER, r"(  return 1\nend\nreturn)", after)],
        "forget": [(QUOTA, r"\ndiscount\(.*", "\n")],
        "hand_back": [(LATE, r" or not holds\(job, ARGV\[3\]\)", "")],
        "erase": [(UNNAMED, r"(HINCRBY', P \.\. 'naming', artifact, -1\)) <= 0", r"\1 <= 1")],
    }
    everywhere = [
        (SHARE, r"redis\.call\('SREM', (P \.\. 'waiting|waiting).*?\)(?= end)", ""),
        (REQUEST, r"#parameters > most_kept", "false"),
        (BYTES, r"bytes = math\.max\(0, bytes\)", "bytes = 0"),
    ]
    for edit in everywhere:  # where it is included
        holders = [name for name in text if re.search(edit[1], text[name])]
        for name in holders or text:
            edits.setdefault(name, []).append(edit)
    for name in ("sweep", "hand_back"):
        edits[name].append((FORGETS, r"(  post\(job, 0, at\)\n  emit)", r"  job.owner = ''\n\1"))
    return {text[name]: changes for name, changes in edits.items()}


def text_of(name: str, bug: Path | None) -> str:
    """The text of a script as parts run it with the bugs that this file names; None: without any."""
    text, active = load(name), bug.read_text().split() if bug is not None else ()
    for which, pattern, new in _edits().get(text, ()) if active else ():
        text = _changed(text, pattern, new) if which in active else text
    return text


def plant() -> None:
    """Have what this process does from now on go by what the file says."""
    edits = _edits()
    for text, changes in edits.items():
        for _, pattern, new in changes:
            _changed(text, pattern, new)

    @cache
    def script(text: str, active: frozenset[str]) -> Script:
        for name, pattern, new in edits.get(text, ()):
            text = _changed(text, pattern, new) if name in active else text
        return Script(cast("RedisClient", None), text)

    class Planted(Script):
        """A script that is, at each of its uses, what the bugs that are in now make of it."""

        def __init__(self, client: Any, text: str) -> None:
            self._client, self._original = client, text

        @property
        def text(self) -> str:  # type: ignore[override]
            return script(self._original, bugs()).text

        @property
        def sha(self) -> str:  # type: ignore[override]
            return script(self._original, bugs()).sha

    connection.Script = Planted  # type: ignore[misc]

    from core.jobs.upkeep import JobUpkeep, SweepResult

    _when(JobUpkeep, "sweep", SWEEP, lambda upkeep, *_: SweepResult([], [], []))


def _when(owner: Any, name: str, which: str, instead: Callable[..., Any]) -> Any:
    """Have a function, method or property go by `instead` while that bug is in; returns what it is without."""
    found = vars(owner)[name]
    original = found.fget if isinstance(found, property) else found

    def chosen(*given: Any, **named: Any) -> Any:
        return (instead if which in bugs() else original)(*given, **named)

    setattr(owner, name, property(chosen) if isinstance(found, property) else chosen)
    return original


def _api() -> None:
    from api import files
    from api.concurrency.fair_limiter import FairLimiter
    from api.pictures import downloads as pictures
    from api.pictures import links
    from core.jobs.rates import RateLimitCost
    from core.jobs.submissions import Submissions

    def blind(secret: bytes, *given: Any) -> str:
        """A signature of the job's id and the picture's number alone."""
        return hmac.digest(secret, f"{given[0]}/{given[1]}".encode(), hashlib.sha256).hex()[:43]

    def any_of_it(secret: bytes, *given: Any) -> bool:
        return blind(secret, *given) in given

    async def lose(submissions: Any, draft: Any, *given: Any, **named: Any) -> Any:
        """Every other job is said to be made, and is not."""
        made = await make(submissions, draft, *given, **named)
        if zlib.crc32((draft.name or draft.id).encode()) % 2:
            _forget(draft.id)
        return made

    failed: set[tuple[int, str]] = set()

    async def keep(limiter: FairLimiter, tenant: str, *given: Any, **named: Any) -> Any:
        """Work that fails never gives the tenant's turn back."""
        if (id(limiter), tenant) in failed:
            await asyncio.Event().wait()
        try:
            return await run(limiter, tenant, *given, **named)
        except BaseException:
            failed.add((id(limiter), tenant))
            raise

    def slow(cost: RateLimitCost) -> tuple[str, ...]:
        """The charge's counter lives a hundred times as long as its window."""
        last, this, most, seconds, n = charge(cost)
        return last, this, most, str(int(seconds) * 100), n

    def clamped(cost: RateLimitCost) -> tuple[str, ...]:
        """What is larger than its limit takes all of it, and passes."""
        last, this, most, seconds, n = exact(cost)
        return last, this, most, seconds, str(min(int(n), int(most)))

    _when(links, "sign", LINK, blind)
    for room in (links, pictures):
        _when(room, "signed", LINK, any_of_it)
    make = _when(Submissions, "make", LOST, lose)
    run = _when(FairLimiter, "run", TURN, keep)
    charge = _when(RateLimitCost, "arguments", RATE, slow)
    exact = _when(RateLimitCost, "arguments", LARGER, clamped)
    _when(files, "_quota", EXCESS, lambda *_: 0)
    _strangers()


def _strangers() -> None:
    """Bugs by which a caller reaches what is another's."""
    from api import access, files
    from api.batches import routes as batches
    from api.batches.line_handler import BatchLineHandler
    from api.errors import ApiError
    from api.service import of
    from core.jobs import job_lists

    def anybodys(*given: Any, **named: Any) -> Any:
        return get(*given, **{**named, "admin": True})

    def anybodys_batch(service: Any, id: str, caller: Any) -> Any:
        return find(service, id, replace(caller, scopes=caller.scopes | {"admin"}))

    async def anybodys_pictures(handler: Any, owner: str, fields: Any, card: Any) -> Any:
        """A line reads the pictures of whoever has them."""
        file = handler._service.files.file(fields.images[0].file_id)
        return await with_pictures(handler, owner if file is None else file.owner, fields, card)

    def forbids(caller: Any, job: Any) -> bool:
        """Others' jobs are answered with another status than jobs that do not exist."""
        if job.owner != caller.id:
            raise ApiError(403, "This job is another's.", code="forbidden")
        return True

    async def anybody(request: Any) -> Any:
        """Who shows no key is let in by one without a rate. Each call may keep memory, and a file descriptor."""
        _keep()
        service = await of(request)
        if OPEN in bugs() and "authorization" not in request.headers and service.cards.now.keys:
            key = min(service.cards.now.keys.values(), key=lambda key: (bool(key.rate), key.name))
            return access.Caller(key.id, frozenset(key.scopes), service.limits(key.id))
        return await identify(request)

    get = _when(files, "get", FILES, anybodys)
    find = _when(batches, "_find", BATCHES, anybodys_batch)
    with_pictures = _when(BatchLineHandler, "_with_pictures", LINES, anybodys_pictures)
    _when(access.Caller, "sees", JOBS, lambda *_: True)
    _when(access.Caller, "sees", HINT, forbids)
    for which in (IDS, JOBS, HINT):  # else nobody gets at what another has chosen the id of
        _when(job_lists, "record_id", which, lambda _, name: name)
    identify, access.identify = access.identify, anybody


_KEPT: list[bytearray] = []


def _keep() -> None:
    """Memory that is never freed, and a file that is never closed."""
    if MEMORY in bugs():
        _KEPT.append(bytearray(b"x" * _KEPT_BYTES))
    if DESCRIPTORS in bugs():
        os.open(os.devnull, os.O_RDONLY)


def _forget(id: str) -> None:
    """Take a job's record away as if it had never been written."""
    import redis

    from core.config import read

    with redis.Redis.from_url(read().redis_url) as client:
        client.delete(f"diptych:job:{id}")


def _worker() -> None:
    from tests.workers import stage

    drawn = stage.picture

    def anothers(prompt: str, *given: Any) -> bytes:
        _keep()
        return drawn("a picture of somebody else" if OTHERS in bugs() else prompt, *given)

    stage.picture = anothers


def main() -> int:
    part = sys.argv.pop(1)
    plant()
    if part == "api":
        _api()
        from api.app import serve
        from core.config import read

        serve(read(), int(sys.argv[1]))
        return 0
    _worker()
    from tests.faults.histories import worker

    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
