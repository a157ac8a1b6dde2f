"""Measures images per second of one model with one more optimization per rung, each rung in a process of its own.

The first rung is the stock pipeline at its best: threads, processes side by side, batches, memory format, precision and
torch's compiler are tried shortly, and the fastest is taken. All rungs are prepared first; then they take turns, and a
process that has not its turn is stopped. It measures only speed; `lab.bench.ways` measures quality.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from core.config import Settings
from lab.bench.harness import provenance, record
from lab.bench.harness.processes import ProcessGroup
from lab.bench.harness.turns import Contender, LeftOut, alternate
from lab.bench.launcher import COMPILE_S, NATIVE, Launcher, best_stock, environment_of
from lab.bench.rungs import IN_FLIGHT, RUNGS, STOCK
from lab.bench.tables import TABLES

_ROUND = 32  # images of each rung at least before it is the next one's turn: drift of the machine meets all alike
_TURN_S, _MOST_ROUNDS = 4.0, 16  # a fast rung's turn has more: its first and last images are in few's company
_WARM = 8  # images before a rung's first turn


class Turns:
    """Runs turns of `_ROUND` images of each rung, or of about `_TURN_S` where these are more, and prints each rate."""

    def __init__(self, count: int) -> None:
        self._count = max(1, count)
        self._contenders: dict[str, Contender] = {}
        self._images: dict[str, int] = {}  # of a turn
        self._number = 0

    def add(self, name: str, contender: Contender) -> None:
        """Warm a rung up."""
        record.progress(f"warming up {name}")
        rate = self._rate(contender, _WARM * contender.processes)
        self._images[name] = _ROUND * min(_MOST_ROUNDS, max(1, round(_TURN_S * rate / _ROUND)))
        self._contenders[name] = contender

    def run(self) -> dict[str, tuple[float, float, float]]:
        """Run all turns; returns each rung's (median, lowest, highest) images per second."""

        def measure(name: str, contender: Contender, turn: int) -> float:
            rate = self._rate(contender, self._images[name])
            record.progress(f"turn {turn + 1} of {self._count}: {name} {rate:.3f} pictures/s")
            return rate

        measured = alternate(self._contenders, self._count, measure)
        return {name: (statistics.median(rates), min(rates), max(rates)) for name, rates in measured.items()}

    def _rate(self, contender: Contender, count: int) -> float:
        """Images per second of so many images, none of which was drawn before."""
        self._number += count
        return count / contender.draw(self._number - count, count)[0]


def run(
    settings: Settings,
    *,
    steps: int,
    pictures: int,
    results: Path | None,
    rungs: Sequence[str] = RUNGS,
    student: str | None = None,
    compile_limit_s: float = COMPILE_S,
    instructions: str = NATIVE,
) -> dict[str, Any]:
    """Measure the rungs in turns of at least `_ROUND` images, at least `pictures` of each; report the median turn.

    A rung that cannot run here, or that torch.compile does not compile within `compile_limit_s`, is left out, with the
    reason. `student` is the model of the rungs that draw with one; default: the model's own name and "-turbo".
    `instructions` limit torch, its libraries and our kernels to AVX2.
    """
    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise record.BenchError(f"--rungs: there is no {', '.join(unknown)}; there are {', '.join(RUNGS)}")
    launcher = Launcher(settings, steps, student, environment_of(settings, instructions), compile_limit_s)
    turns = Turns(-(-pictures // _ROUND))
    with record.alone(), ExitStack() as stack:
        contenders, stock, left_out = _prepared(launcher, rungs, turns, stack)
        measured = turns.run()
    result = {
        "rungs": _rows(measured, contenders),
        "left_out": left_out,
        "stock": stock,
        "capability": next(iter(contenders.values())).description["capability"],
        "model": Path(settings.model_name).name,
        "steps": steps,
        "pictures": -(-pictures // _ROUND) * _ROUND,
        "in_flight": IN_FLIGHT,
    }
    imported = set[str]().union(*(contender.imported for contender in contenders.values()))
    file = "ladder" if instructions == NATIVE else f"ladder-{instructions}"
    artifacts = (*provenance.EMOJI_XL, "models/emoji-xl-turbo")
    return record.publish(file, result, results, artifacts=artifacts, imported=imported, table=TABLES["ladder"])


def _prepared(
    launcher: Launcher, rungs: Sequence[str], turns: Turns, stack: ExitStack
) -> tuple[dict[str, Contender], dict[str, Any], dict[str, str]]:
    """The rungs' processes, warmed up and stopped; how the stock pipeline is best; and why rungs are left out.

    Raises `BenchError` if all are.
    """
    contenders: dict[str, Contender] = {}
    stock: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name in rungs:
        record.progress(f"preparing {name}")
        try:
            if name == STOCK:
                variant, count, trials = best_stock(launcher)
                stock = {"best": asdict(variant), "processes": count, "trials": trials}
                started = [launcher.start(name, stack, variant) for _ in range(count)]
            else:
                started = [launcher.start(name, stack)]
            contender = ProcessGroup([process for process, _ in started], started[0][1])
            turns.add(name, contender)
            contenders[name] = contender
        except LeftOut as error:
            left_out[name] = str(error)
            record.progress(f"{name} is left out: {error}")
    if not contenders:
        raise record.BenchError(f"no rung can be measured here: {left_out}")
    return contenders, stock, left_out


def _rows(
    measured: Mapping[str, tuple[float, float, float]], contenders: Mapping[str, Contender]
) -> list[dict[str, Any]]:
    """The rungs as recorded."""
    first, *_ = measured.values()
    return [
        {
            "name": name,
            "images_per_s": round(rate, 4),
            "speedup": round(rate / first[0], 3),
            "spread": [round(value, 4) for value in (low, high)],
            **{key: value for key, value in contenders[name].description.items() if key != "capability"},
        }
        for name, (rate, low, high) in measured.items()
    ]
