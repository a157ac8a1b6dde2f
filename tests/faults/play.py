"""Runs one scenario on a stack: healthy service, fault, recovery, judgement."""

from __future__ import annotations

from tests.faults.rounds import Gallery, Outcome, Round
from tests.faults.scenarios import SCENARIOS, Load
from tests.faults.stack import Stack


def play(name: str, stack: Stack, gallery: Gallery, jobs: int, seconds: float) -> Outcome:
    """What the scenario came to, under a load of so many jobs, each of so many seconds of a worker.

    Raises an exception, with the ends of all logs, if the scenario could not be run.
    """
    try:
        stack.settle()
        load = Load.lasting(stack, jobs, seconds)
        gallery.draw(stack, {*load.orders, *load.longer})
        round = Round(stack, gallery)
        SCENARIOS[name](round, load)
        outcome = round.judge()
    except BaseException as error:
        error.add_note(stack.logs())
        raise
    if outcome.problems:
        outcome.problems.append(stack.logs())
    return outcome
