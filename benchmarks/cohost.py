"""Pictures and text on one engine: each panel's throughput alone and together, and whether both keep their objectives.

A panel's share is its rate together over its rate alone: on one processor the two shares add up to one, less what
switching costs. Knows the engine; measures closed loops of a fixed number of requests in flight.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record
from core.batching.engine import Engine
from core.batching.request import Outcome, Request

if TYPE_CHECKING:
    from core.config import Settings

PICTURES_IN_FLIGHT, TEXTS_IN_FLIGHT = 8, 16
_WARM_S = 3.0
_TOKENS = (24, 32, 48, 64, 96)


@dataclass
class Loop:
    """Keeps so many requests in flight while it is open, and notes what they came to, once it counts."""

    engine: Engine
    make: Callable[[int], Request]
    in_flight: int
    ended: list[float] = field(default_factory=list)  # seconds that each took
    tokens: int = 0
    steps: int = 0  # denoising steps, of all requests together
    gaps: list[float] = field(default_factory=list)  # seconds from token to token, of each iteration that brought any
    counts: bool = False
    _open: bool = True
    _numbers: Any = field(default_factory=itertools.count)
    _left: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def start(self) -> None:
        for _ in range(self.in_flight):
            self._next()

    def close(self) -> None:
        """Begin no more, and wait for what is under way."""
        self._open = False
        for _ in range(self.in_flight):
            self._left.acquire()

    def _next(self) -> None:
        if not self._open:
            self._left.release()
            return
        request = self.make(next(self._numbers))
        started = time.perf_counter()
        last: float | None = None

        def hear(_: Request, outcome: Outcome) -> None:
            nonlocal last
            if outcome.token is None:
                self.steps += self.counts and not outcome.finished
                return
            now = time.perf_counter()
            if self.counts:
                self.tokens += len(outcome.token.tokens)
                if last is not None:
                    self.gaps += [(now - last) / len(outcome.token.tokens)] * len(outcome.token.tokens)
            last = now

        def done(future: Future[Any]) -> None:
            if self.counts and future.exception() is None:
                self.ended.append(time.perf_counter() - started)
            self._next()

        request.listener = hear
        self.engine.submit(request).add_done_callback(done)


def run(
    settings: Settings, *, seconds: float = 30.0, steps: int = 20, results: Path | None = None, turns: int = 2
) -> dict[str, Any]:
    """Measure pictures alone, texts alone and both, in turns of `seconds` each."""
    from workers.build import build

    with record.alone(), build(settings, text=True, measure_s=10.0) as works:
        if works.texts is None:
            raise record.BenchError("there is no text model: see DIPTYCH_TEXT_MODEL")
        pictures, texts = _pictures(works, steps), _texts(works)
        kinds = {"image": (pictures, PICTURES_IN_FLIGHT), "text": (texts, TEXTS_IN_FLIGHT)}
        found: dict[str, list[dict[str, Loop]]] = {"image": [], "text": [], "both": []}
        for _ in range(turns):
            for what in found:
                wanted = [what] if what in kinds else list(kinds)
                loops = {name: Loop(works.engine, *kinds[name]) for name in wanted}
                _measure(loops, seconds)
                found[what].append(loops)
        objectives = {"tpot_s": settings.text_token_s, "image_s": settings.image_objective_s}
        model, text_model = works.images.model.name, works.texts.model.name
    # By steps: pictures end in bursts, and a share of few of them would be chance.
    images_s = [_rate([turn["image"].steps for turn in found[what]], seconds) / steps for what in ("image", "both")]
    tokens_s = [_rate([turn["text"].tokens for turn in found[what]], seconds) for what in ("text", "both")]
    gaps = sorted(gap for turn in found["both"] for gap in turn["text"].gaps)
    took = sorted(one for turn in found["both"] for one in turn["image"].ended)
    shares = [rate[1] / rate[0] if rate[0] else math.nan for rate in (images_s, tokens_s)]
    record.table(
        f"{model}, {steps} steps, and {text_model}, on one engine",
        ("panel", "alone", "together", "share"),
        [
            ("pictures/s", f"{images_s[0]:.2f}", f"{images_s[1]:.2f}", f"{shares[0]:.2f}"),
            ("tokens/s", f"{tokens_s[0]:.0f}", f"{tokens_s[1]:.0f}", f"{shares[1]:.2f}"),
        ],
    )
    result = {
        "image_share": round(shares[0], 4),
        "text_share": round(shares[1], 4),
        "sum": round(sum(shares), 4),
        "tpot_p99_s": _p99(gaps),
        "image_p99_s": _p99(took),
        "images_per_s": {"alone": round(images_s[0], 4), "together": round(images_s[1], 4)},
        "tokens_per_s": {"alone": round(tokens_s[0], 1), "together": round(tokens_s[1], 1)},
        "tpot_alone_p99_s": _p99(sorted(gap for turn in found["text"] for gap in turn["text"].gaps)),
        "objectives": objectives,
        "in_flight": {"image": PICTURES_IN_FLIGHT, "text": TEXTS_IN_FLIGHT},
        "steps": steps,
        "model": model,
        "text_model": text_model,
        "machine": record.machine(),
    }
    record.publish("cohost", result, results)
    return result


def _measure(loops: dict[str, Loop], seconds: float) -> None:
    for loop in loops.values():
        loop.start()
    time.sleep(min(_WARM_S, seconds))
    for loop in loops.values():
        loop.counts = True
    time.sleep(seconds)
    for loop in loops.values():
        loop.counts = False
    for loop in loops.values():
        loop.close()


def _pictures(works: Any, steps: int) -> Callable[[int], Request]:
    from pipeline.parameters import ImageParameters

    native, ids = works.images.model.native, itertools.count()

    def make(number: int) -> Request:
        wanted = ImageParameters(f"picture {number} of a small red boat", number, native, native, steps=steps)
        return Request(f"picture-{next(ids)}", "image", wanted)

    return make


def _texts(works: Any) -> Callable[[int], Request]:
    from llm.parameters import TextParameters

    model, ids = works.texts.model, itertools.count()
    most = min(_TOKENS[-1], works.texts.context // 2)

    def make(number: int) -> Request:
        draw = random.Random(number)
        prompt = tuple(draw.randrange(6, model.vocabulary) for _ in range(draw.randint(4, most // 2)))
        wanted = TextParameters(prompt, min(most, draw.choice(_TOKENS)), temperature=0, ignore_end=True)
        return Request(f"text-{next(ids)}", "text", wanted)

    return make


def _rate(counts: list[int], seconds: float) -> float:
    return sum(counts) / (len(counts) * seconds)


def _p99(values: list[float]) -> float | None:
    return round(values[math.ceil(0.99 * len(values)) - 1], 5) if values else None
