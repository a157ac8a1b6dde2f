"""Plays one scenario on a stack: from a service that is well, over the fault, to the judgement.

Knows the order of things; knows nothing of what is broken.
"""

from __future__ import annotations

from tests.faults.rounds import Gallery, Outcome, Round
from tests.faults.scenarios import SCENARIOS, Load
from tests.faults.stack import Stack


def play(name: str, stack: Stack, gallery: Gallery, load: Load) -> Outcome:
    """What the scenario came to. An exception tells what could not even be tried, with the ends of all logs."""
    try:
        stack.settle()
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
