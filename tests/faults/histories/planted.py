"""Injects bugs that the checker must find into the processes of a history.

    BUG=file python -m tests.faults.histories.planted api --fd N | worker …

The file names the active bug. Bugs replace parts of the scripts' text: if the product no longer contains that part, the
process exits, so that no bug is silently missing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.jobs import connection
from core.jobs.scripts import load

FENCING, SWEEP, LINK = "fencing-off", "sweep-off", "link-without-artifact"
AFTER, LOST, OTHERS = "event-after-end", "lost-write", "others-bytes"
BUGS = (FENCING, SWEEP, LINK, AFTER, LOST, OTHERS)


def bug() -> str:
    """The one that is in now; empty if none is."""
    try:
        return Path(os.environ["BUG"]).read_text()
    except OSError:
        return ""


def _changed(text: str, pattern: str, new: str) -> str:
    changed, count = re.subn(pattern, new, text)
    if not count:
        sys.exit(f"planted: no script holds {pattern!r} any more")
    return changed


def _scripts() -> dict[tuple[str, str], str]:
    """(bug, script) → the script with the bug."""
    report, renew, finish = (load(f"jobs/{name}") for name in ("report", "renew", "finish"))
    # Whether it is the attempt that runs which writes.
    holds = r" and (job\.attempt == ARGV\[i \+ 1\]|holds\(job, ARGV\[i \+ 1\]\))"
    ended = r" or (job\.attempt ~= ARGV\[3\]|not holds\(job, ARGV\[3\]\))"
    job = "job" if "emit(job, " in finish else "job.id"
    return {
        (FENCING, report): _changed(report, holds, ""),
        (FENCING, renew): _changed(renew, r" and job\.worker == ARGV\[2\]" + holds, ""),
        (FENCING, finish): _changed(finish, ended, ""),
        (AFTER, finish): _changed(
            finish, r"(  return 1\nend\nreturn)", f"  emit({job}, 'progress', '{{\"steps_done\":1}}')\n\\1"
        ),
    }  # fmt: skip


def plant() -> None:
    """Have what this process does from now on go by what the file says."""
    changed = _scripts()
    make, call = connection.Script.__init__, connection.Script.__call__

    def made(script: Any, client: Any, text: str) -> None:
        make(script, client, text)
        script.others = {}
        for (name, original), other in changed.items():
            if original == text:
                script.others[name] = variant = object.__new__(connection.Script)
                make(variant, client, other)

    def called(script: Any, *arguments: Any) -> Any:
        return call(getattr(script, "others", {}).get(bug(), script), *arguments)

    connection.Script.__init__ = made  # type: ignore[method-assign,assignment]
    connection.Script.__call__ = called  # type: ignore[method-assign]

    from core.jobs.store import JobStore
    from core.jobs.upkeep import SweepResult

    _when(JobStore, "sweep", SWEEP, lambda store, *_: SweepResult([], [], []))


def _when(owner: Any, name: str, which: str, instead: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def chosen(*given: Any, **named: Any) -> Any:
        return (instead if bug() == which else original)(*given, **named)

    setattr(owner, name, chosen)


def _api() -> None:
    from api import links, pictures
    from core.jobs.submissions import Submissions

    def blind(secret: bytes, *given: Any) -> str:
        """A signature of the job's id and the picture's number alone."""
        return hmac.digest(secret, f"{given[0]}/{given[1]}".encode(), hashlib.sha256).hex()[:43]

    def any_of_it(secret: bytes, *given: Any) -> bool:
        return blind(secret, *given) in given

    _when(links, "sign", LINK, blind)
    for room in (links, pictures):
        _when(room, "signed", LINK, any_of_it)
    make = Submissions.make

    async def lose(submissions: Any, draft: Any, *given: Any, **named: Any) -> Any:
        """Every other job is said to be made, and is not."""
        if bug() == LOST and zlib.crc32(draft.id.encode()) % 2:
            made = await make(submissions, draft, *given, **named)
            _forget(draft.id)
            return made
        return await make(submissions, draft, *given, **named)

    Submissions.make = lose  # type: ignore[method-assign]


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
        return drawn("a picture of somebody else" if bug() == OTHERS else prompt, *given)

    stage.picture = anothers


def main() -> int:
    part = sys.argv.pop(1)
    plant()
    if part == "api":
        _api()
        from tests.faults import fragile

        fragile.main()
        return 0
    _worker()
    from tests.faults.histories import worker

    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
