"""Runs random histories up to a number of faults: `python -m tests.faults.histories --faults 10000 --seed 1`.

Resumes from the file `state.json` in the folder. Rejected histories are stored there: the history, and a schedule
minimized to few faults, which `--replay FILE` runs again. Exit code 1: at least one was rejected.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.faults.histories.checker import check
from tests.faults.histories.faults import draw, possible
from tests.faults.histories.history import play
from tests.faults.histories.planted import BUGS
from tests.faults.histories.record import Fault, History
from tests.faults.histories.shrink import shrink
from tests.faults.histories.world import World, checkout
from tests.faults.parts import ROOT

_REPLAYS = 20  # to shrink a failure
_RENEWED = 25  # histories of one world: then a new one, on the other kind of storage


class House:
    """Reuses a world as long as it is healthy and not too old."""

    def __init__(self, other: Path | None, real: bool, bug: str = "") -> None:
        """`bug`: what is planted into every part; empty: nothing."""
        self._other, self._real, self._bug = other, real, bug
        self._open = ExitStack()
        self._world: World | None = None
        self._age = 0

    def world(self, objects: bool) -> World:
        if self._world is None or self._world.objects != objects or self._age >= _RENEWED:
            self.close()
            folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="diptych-histories-")))
            bug = folder / "bug" if self._bug else None
            if bug is not None:
                bug.write_text(self._bug)
            world = World(folder / "world", objects=objects, bug=bug, other=self._other, real=self._real)
            self._world = self._open.enter_context(world)
        self._age += 1
        return self._world

    def close(self) -> None:
        self._world, self._age = None, 0
        self._open.close()


def one(house: House, seed: int, schedule: Sequence[Fault], objects: bool, span_s: float) -> tuple[History, list[str]]:
    """A history, and what is wrong with it. What could not even be played is wrong, too."""
    world = house.world(objects)
    try:
        history = play(world, seed, schedule, span_s)
        problems = [str(problem) for problem in check(history)]
    except Exception as error:
        history = History(seed, list(schedule))
        problems = [f"unplayed: {type(error).__name__}: {error}"]
    if problems:
        problems.append(world.logs())
        house.close()  # so that nothing that went wrong is carried over
    return history, problems


def rules(problems: Sequence[str]) -> set[str]:
    return {problem.partition(":")[0] for problem in problems if "\n" not in problem}


def keep(folder: Path, name: str, history: History, problems: Sequence[str], **more: Any) -> Path:
    history.write(folder / f"{name}.history.json")
    told = {
        "seed": history.seed, "problems": list(problems), **more,
        "faults": [vars(fault) for fault in history.faults],
    }  # fmt: skip
    path = folder / f"{name}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description="Random histories, judged by a checker.")
    parser.add_argument("--faults", type=int, default=10_000, metavar="N", help="in all; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--each", type=int, default=14, metavar="N", help="faults of one history; default: %(default)s")
    parser.add_argument("--span", type=float, default=8.0, metavar="S", help="of one history; default: %(default)s")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "histories", help="default: build/histories")
    parser.add_argument("--other", default="", metavar="COMMIT", help="parts are also started with this one's code")
    parser.add_argument("--model", choices=("stand-in", "tiny"), default="stand-in", help="who draws")
    parser.add_argument(
        "--planted", nargs="+", choices=BUGS, metavar="BUG",
        help=f"plant each of these in turn, until a history is rejected, of {', '.join(BUGS)}",
    )  # fmt: skip
    parser.add_argument("--replay", type=Path, metavar="FILE", help="play what failed once more")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    other = checkout(options.other, options.folder) if options.other else None
    if options.planted:
        return int(sum(_detect(bug, options) for bug in options.planted) < len(options.planted))
    house = House(other, real=options.model == "tiny")
    try:
        if options.replay:
            raw = json.loads(options.replay.read_text())
            schedule = [Fault(**fault) for fault in raw["faults"]]
            _, problems = one(house, raw["seed"], schedule, raw["objects"], raw["span_s"])
            print("\n".join(problems) or "well")
            return int(bool(problems))
        return _run(house, options)
    finally:
        house.close()


def _detect(bug: str, options: argparse.Namespace) -> bool:
    """Plant a bug and play until a history is rejected, or so many faults were played. Prints by which rules."""
    house, played, number = House(None, options.model == "tiny", bug), 0, 0
    try:
        while played < options.faults:
            schedule = draw(options.seed + number, possible(house.world(False)), options.each, options.span)
            history, problems = one(house, options.seed + number, schedule, False, options.span)
            played, number = played + len(history.faults), number + 1
            if problems:
                print(f"{bug}: {', '.join(sorted(rules(problems)))} after {played} faults", flush=True)
                return True
    finally:
        house.close()
    print(f"{bug}: not found in {played} faults", flush=True)
    return False


def _run(house: House, options: argparse.Namespace) -> int:
    path: Path = options.folder / "state.json"
    state: dict[str, Any] = {
        "seed": options.seed, "next": 0, "faults": 0, "calls": 0, "accepted": 0, "failed": [], "kinds": {},
        "seconds": 0.0,
    }  # fmt: skip
    if path.exists() and (found := json.loads(path.read_text()))["seed"] == options.seed:
        state = found
    while state["faults"] < options.faults:
        number = state["next"]
        seed, objects = options.seed * 1_000_000 + number, number // _RENEWED % 2 == 1
        started = time.monotonic()
        schedule = draw(seed, possible(house.world(objects)), options.each, options.span)
        history, problems = one(house, seed, schedule, objects, options.span)
        took_s = time.monotonic() - started
        accepted = sum(call.op == "submit" and call.outcome == "ok" for call in history.calls)
        state["kinds"] = dict(Counter(state["kinds"]) + Counter(fault.kind for fault in history.faults))
        counts = {"next": 1, "faults": len(history.faults), "calls": len(history.calls), "accepted": accepted}
        for name, more in {**counts, "seconds": took_s}.items():
            state[name] += more
        words = "well" if not problems else f"NOT WELL ({', '.join(sorted(rules(problems)))})"
        rate = 60 * state["faults"] / state["seconds"]
        told = f"{len(history.faults)} faults, {len(history.calls)} calls, {accepted} accepted"
        whole = f"{state['faults']} faults in all, {rate:.0f} a minute"
        print(f"{number} in {took_s:.0f} s: {told}: {words}; {whole}", flush=True)
        if problems:
            print("\n".join(problems[:8][:-1]), flush=True)
            state["failed"].append(number)
            keep(options.folder, f"failed-{seed}", history, problems, objects=objects, span_s=options.span)
            _shrunk(house, options, seed, history, problems, objects)
        path.write_text(json.dumps(state, indent=1) + "\n")
    print(json.dumps(state))
    return int(bool(state["failed"]))


def _shrunk(
    house: House, options: argparse.Namespace, seed: int, history: History, problems: list[str], objects: bool
) -> None:
    """Leave out faults as long as one of the same rules is broken. What never breaks again is kept as it was."""
    broken, best = rules(problems), (history, problems)

    def fails(schedule: list[Fault]) -> bool:
        nonlocal best
        found, wrong = one(house, seed, schedule, objects, options.span)
        if rules(wrong) & broken:
            best = found, wrong
            return True
        return False

    short = shrink(history.faults, fails, _REPLAYS)
    print(f"shrunk from {len(history.faults)} to {len(short)} faults: {[fault.kind for fault in short]}", flush=True)
    keep(options.folder, f"shrunk-{seed}", best[0], best[1], objects=objects, span_s=options.span)


if __name__ == "__main__":
    sys.exit(main())
