"""Runs an API that crashes right after it has created a job with a certain prompt, before it answers.

An entry point for the fault tests: `python -m tests.faults.fragile --fd N`. Otherwise it is the API of `diptych api`.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from api.app import serve
from core.config import read
from core.jobs.creation import JobCreation
from core.jobs.record import JobDraft
from core.jobs.submissions import Submissions

DIES = "the server dies now"  # in a prompt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    make = Submissions.make

    async def make_and_die(submissions: Submissions, draft: JobDraft, *given: Any, **named: Any) -> JobCreation:
        made = await make(submissions, draft, *given, **named)
        if DIES in draft.parameters.get("prompt", ""):
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    Submissions.make = make_and_die  # type: ignore
    serve(read(), fd=options.fd)


if __name__ == "__main__":
    main()
