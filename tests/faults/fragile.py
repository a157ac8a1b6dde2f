"""The API with one weakness: it is gone the moment after it made a job whose prompt asks for that, before it sends it.

An entry for the fault tests: `python -m tests.faults.fragile --fd N`. All else is the API as `diptych api` runs it.
"""

from __future__ import annotations

import argparse
import os
import signal

from api.app import serve
from core.config import read
from core.jobs.record import Draft, Job
from core.jobs.store import JobStore

DIES = "the server dies now"  # in a prompt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    make = JobStore.make

    def make_and_die(store: JobStore, draft: Draft) -> tuple[Job, bool]:
        made = make(store, draft)
        if DIES in draft.parameters.get("prompt", ""):
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    JobStore.make = make_and_die  # type: ignore
    serve(read(), fd=options.fd)


if __name__ == "__main__":
    main()
