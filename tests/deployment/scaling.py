"""A stand-in for KEDA and Kubernetes's HorizontalPodAutoscaler, which scale by the formula of the chart.

The formula and the places of its values in /metrics are those of the chart's template, read without Helm.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.deployment.served import ROOT

TEMPLATE = (ROOT / "deployment" / "helm" / "diptych" / "templates" / "autoscaling.yaml").read_text("utf-8")
STATES = ("queued", "running")
_TOLERANCE = 0.1  # of the HorizontalPodAutoscaler


def formula(models: int, target_s: float, loading_s: float) -> str:
    """The formula of an entry with so many models."""
    found = re.search(r"formula: >-\n(.*?)\n +target:", TEMPLATE, re.DOTALL)
    assert found is not None
    work = " + ".join(f"{state}_{k}" for k in range(models) for state in STATES)
    values = {"work": f"({work})", "target": f"{target_s:.1f}", "further": f"{target_s - loading_s:.1f}"}
    return " ".join(re.sub(r"\{\{ \$(\w+) \}\}", lambda match: values[match[1]], found[1]).split())


def evaluated(formula: str, values: Mapping[str, float]) -> float:
    """The number of workers, by a formula that is read as Python once its conditional operators are turned."""
    *cases, otherwise = formula.split(" : ")
    text = "".join("({1}) if ({0}) else ".format(*case.split(" ? ")) for case in cases) + otherwise
    return float(eval(text, {"max": max}, dict(values)))


def locations(models: list[str]) -> dict[str, str]:
    """Where in /metrics each value of the formula is."""
    work, workers = re.findall(r'printf "(diptych_\w+)\{model=%q,state=%q\}"', TEMPLATE)
    sample = '{}{{model="{}",state="{}"}}'
    found = {f"{state}_{k}": sample.format(work, name, state) for k, name in enumerate(models) for state in STATES}
    return found | {"ready": sample.format(workers, models[0], "ready")}


def read(text: str, places: Mapping[str, str]) -> dict[str, float]:
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(samples[place]) for name, place in places.items()}


@dataclass
class Autoscaler:
    """Scales an entry from 0 to `most` replicas: KEDA between 0 and 1, the HorizontalPodAutoscaler above.

    `metrics` fetches /metrics, `scale` sets the number of replicas. `window_s` is the scale-down stabilization window.
    """

    formula: str
    places: Mapping[str, str]
    metrics: Callable[[], str]
    scale: Callable[[int], None]
    most: int
    window_s: float
    cooldown_s: float
    replicas: int = 0
    _active: float = -math.inf
    _asked: list[tuple[float, int]] = field(default_factory=list)

    def poll(self) -> None:
        value, now = evaluated(self.formula, read(self.metrics(), self.places)), time.monotonic()
        if value > 0:
            self._active = now
        if not self.replicas:
            self._set(1 if value > 0 else 0)
        elif value <= 0 and now - self._active >= self.cooldown_s:
            self._set(0)
            self._asked.clear()
            return
        if not self.replicas:
            return
        within = abs(value / self.replicas - 1) <= _TOLERANCE
        self._asked.append((now, self.replicas if within else min(self.most, max(1, math.ceil(value)))))
        self._asked = [(at, count) for at, count in self._asked if now - at <= self.window_s]
        peak = max(count for _, count in self._asked)
        self._set(max(min(peak, self.replicas), self._asked[-1][1]))

    def _set(self, replicas: int) -> None:
        if replicas != self.replicas:
            self.replicas = replicas
            self.scale(replicas)
