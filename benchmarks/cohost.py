"""Measures images and text on one engine: each modality's throughput alone and together, and their latency objectives.

A modality's share is its rate together divided by its rate alone: on one processor the shares add up to one, minus the
cost of switching. If the latency objective of text is shorter than one forward of all images in flight, images would
need narrow batches, which cost more per row: then a longer objective, derived from the cost curves, is used.
Measures closed loops of a fixed number of requests in flight.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import provenance, record
from benchmarks.loop import Loop
from core.batching.request import Request
from llm.runner import GROUP
from pipeline.backends.backend import BatchGroup
from pipeline.phases import DEEP

if TYPE_CHECKING:
    from core.config import Settings
    from workers.build import Runtime

PICTURES_IN_FLIGHT, TEXTS_IN_FLIGHT = 8, 16
_WARM_S = 3.0
_TOKENS = (24, 32, 48, 64, 96)
_SLACK = 2.0  # over the means that curves tell: on shared cores one iteration in a hundred takes that long


def run(
    settings: Settings,
    *,
    seconds: float = 30.0,
    steps: int = 20,
    results: Path | None = None,
    turns: int = 2,
    strict: bool = False,
) -> dict[str, Any]:
    """Measure images alone, texts alone and both, in turns of `seconds` each.

    Text uses the longer of the configured objective and `free_pace_s`; with `strict` always the configured one.
    """
    from workers.build import build

    with record.alone(), build(settings, text=True, measure_s=10.0) as works:
        if works.texts is None:
            raise record.BenchError("there is no text model: see DIPTYCH_TEXT_MODEL")
        pictures, texts = _pictures(works, steps), _texts(works)
        free_s = free_pace_s(works)
        if not strict:
            works.texts.pace_s = max(works.texts.pace_s, free_s)
        kinds = {"image": (pictures, PICTURES_IN_FLIGHT), "text": (texts, TEXTS_IN_FLIGHT)}
        found = _turns(works, kinds, turns, seconds)
        objectives = {
            "tpot_s": round(works.texts.pace_s, 4),
            "tpot_set_s": settings.text_token_s,
            "tpot_free_s": round(free_s, 4),
            "image_s": settings.image_objective_s,
        }
        model, text_model = works.images.model.name, works.texts.model.name
    # By steps: pictures end in bursts, and a share of few of them would be chance.
    images_s = [_rate([turn["image"].steps for turn in found[what]], seconds) / steps for what in ("image", "both")]
    tokens_s = [_rate([turn["text"].tokens for turn in found[what]], seconds) for what in ("text", "both")]
    gaps = sorted(gap for turn in found["both"] for gap in turn["text"].gaps)
    took = sorted(one for turn in found["both"] for one in turn["image"].ended)
    shares = [_share(images_s), _share(tokens_s)]
    _print(f"{model}, {steps} steps, and {text_model}, on one engine", images_s, tokens_s, took, gaps, objectives)
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
    }
    rooms = (*provenance.IMAGES, *provenance.TEXTS, "benchmarks/cohost.py", "benchmarks/loop.py")
    return record.publish("cohost", result, results, rooms=rooms)


def _turns(
    works: Runtime, kinds: Mapping[str, tuple[Any, int]], turns: int, seconds: float
) -> dict[str, list[dict[str, Loop]]]:
    """Run the turns; returns the measurements of images alone, of texts alone, and of both."""
    found: dict[str, list[dict[str, Loop]]] = {"image": [], "text": [], "both": []}
    for _ in range(turns):
        for what in found:
            wanted = [what] if what in kinds else list(kinds)
            loops = {name: Loop(works.engine, *kinds[name]) for name in wanted}
            _measure(loops, seconds)
            found[what].append(loops)
    return found


def _share(rates: Sequence[float]) -> float:
    """The rate together divided by the rate alone."""
    alone, together = rates
    return together / alone if alone else math.nan


def _print(
    title: str, images_s: Sequence[float], tokens_s: Sequence[float], took: list[float], gaps: list[float],
    objectives: Mapping[str, Any],
) -> None:  # fmt: skip
    record.table(
        title,
        ("panel", "alone", "together", "share", "p99 together", "objective"),
        [
            (
                *("pictures/s", f"{images_s[0]:.2f}", f"{images_s[1]:.2f}", f"{_share(images_s):.2f}"),
                *(_seconds(_p99(took)), _seconds(objectives["image_s"])),
            ),
            (
                *("tokens/s", f"{tokens_s[0]:.0f}", f"{tokens_s[1]:.0f}", f"{_share(tokens_s):.2f}"),
                *(_seconds(_p99(gaps)), _seconds(objectives["tpot_s"])),
            ),
        ],
    )


def free_pace_s(works: Runtime) -> float:
    """The shortest time per token at which images keep their full batch width, by the cost curves.

    That is twice the sum of one UNet forward of all images in flight and one forward of all texts: curves give means.
    """
    assert works.texts is not None
    native = works.images.model.native
    drawn = works.images.cost(BatchGroup(DEEP, (native, native)), 2 * PICTURES_IN_FLIGHT)
    return _SLACK * (drawn + works.texts.cost(GROUP, TEXTS_IN_FLIGHT))


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
    from contract.image import ImageParameters

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


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} s"


def _rate(counts: list[int], seconds: float) -> float:
    return sum(counts) / (len(counts) * seconds)


def _p99(values: list[float]) -> float | None:
    return round(values[math.ceil(0.99 * len(values)) - 1], 5) if values else None
