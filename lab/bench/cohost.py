"""Measures images and text on one engine: each modality's throughput alone and together, and their latency objectives.

A modality's share is its rate together divided by its rate alone: on one processor the shares add up to one, minus the
cost of switching; on a GPU, whose UNet forwards are compute-bound and whose decoding is memory-bound, to more. If the
latency objective of text is shorter than one forward of all images in flight, images would need narrow batches, which
cost more per row: then a longer objective, derived from the cost curves, is used. Measures closed loops of a fixed
number of requests in flight.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.image import ImageParameters
from contract.plan import parse
from core.batching.request import Request
from lab.bench.harness import provenance, record
from lab.bench.harness.loop import Loop, Make, together
from lab.bench.harness.turns import alternate
from lab.bench.tables import TABLES
from llm.parameters import TextParameters
from llm.runner import GROUP
from pipeline.backends.backend import BatchGroup
from pipeline.backends.phases import DEEP

if TYPE_CHECKING:
    from core.config import Settings
    from workers.build import Runtime

IN_FLIGHT = {"cpu": {"image": 8, "text": 16}, "cuda": {"image": 16, "text": 64}}  # by device
_PROMPT = {"cpu": 48, "cuda": 256}  # tokens of a prompt, at most
_ANSWERS = {"cpu": (24, 32, 48, 64, 96), "cuda": (256,)}  # tokens of an answer
_WARM_S = 3.0
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

    with record.alone(), build(settings, text=True, measure_s=10.0) as runtime:
        if runtime.texts is None:
            raise record.BenchError("there is no text model: see DIPTYCH_TEXT_MODEL")
        in_flight = IN_FLIGHT[runtime.images.model.device.type]
        free_s = free_pace_s(runtime)
        if not strict:
            runtime.texts.pace_s = max(runtime.texts.pace_s, free_s)
        turned = _turns(runtime, {"image": _images(runtime, steps), "text": _texts(runtime)}, turns, seconds)
        objectives = {
            "tpot_s": round(runtime.texts.pace_s, 4), "tpot_set_s": settings.text_token_s,
            "tpot_free_s": round(free_s, 4), "image_s": settings.image_objective_s,
        }  # fmt: skip
        model, text_model = runtime.images.model.name, runtime.texts.model.name
    result = _figures(turned, steps, turns * seconds) | {
        "objectives": objectives, "in_flight": in_flight, "steps": steps, "model": model, "text_model": text_model,
    }  # fmt: skip
    return record.publish(
        "cohost", result, results, artifacts=(*provenance.EMOJI_XL, *provenance.EMOJI_LM), table=TABLES["cohost"]
    )


def _turns(runtime: Runtime, makes: Mapping[str, Make], turns: int, seconds: float) -> dict[str, list[dict[str, Loop]]]:
    """The loops of images alone, of texts alone, and of both, in turns."""
    in_flight = IN_FLIGHT[runtime.images.model.device.type]

    def measure(_: str, names: Sequence[str], turn: int) -> dict[str, Loop]:
        loops = {name: Loop(runtime.engine, makes[name], in_flight[name]) for name in names}
        together(loops, min(_WARM_S, seconds), seconds)
        return loops

    return alternate({"image": ["image"], "text": ["text"], "both": list(makes)}, turns, measure)


def _figures(turned: Mapping[str, Sequence[Mapping[str, Loop]]], steps: int, total_s: float) -> dict[str, Any]:
    """Rates alone and together, shares, and latencies."""
    # By steps: images end in bursts, and a share of few of them would be chance.
    images_s = [sum(turn["image"].steps for turn in turned[mode]) / total_s / steps for mode in ("image", "both")]
    tokens_s = [sum(turn["text"].tokens for turn in turned[mode]) / total_s for mode in ("text", "both")]
    shares = [both / alone if alone else math.nan for alone, both in (images_s, tokens_s)]
    gaps = {mode: [gap for turn in turned[mode] for gap in turn["text"].gaps] for mode in ("text", "both")}
    took = [latency for turn in turned["both"] for latency in turn["image"].ended]
    return {
        "image_share": round(shares[0], 4), "text_share": round(shares[1], 4), "sum": round(sum(shares), 4),
        "tpot_p99_s": _p99(gaps["both"]), "image_p99_s": _p99(took),
        "images_per_s": {"alone": round(images_s[0], 4), "together": round(images_s[1], 4)},
        "tokens_per_s": {"alone": round(tokens_s[0], 1), "together": round(tokens_s[1], 1)},
        "tpot_alone_p99_s": _p99(gaps["text"]),
    }  # fmt: skip


def free_pace_s(runtime: Runtime) -> float:
    """The shortest time per token at which images keep their full batch width, by the cost curves.

    That is twice the sum of one UNet forward of all images in flight and one forward of all texts: curves give means.
    """
    assert runtime.texts is not None
    model = runtime.images.model
    in_flight = IN_FLIGHT[model.device.type]
    image_s = runtime.images.cost(BatchGroup(DEEP, (model.native, model.native)), 2 * in_flight["image"])
    return _SLACK * (image_s + runtime.texts.cost(GROUP, in_flight["text"]))


def _images(runtime: Runtime, steps: int) -> Make:
    native, cached, ids = runtime.images.model.native, parse(runtime.settings.deepcache), itertools.count()

    def make(number: int) -> Request:
        prompt = f"picture {number} of a small red boat"
        parameters = ImageParameters(prompt, number, native, native, steps=steps, deepcache=cached)
        return Request(f"picture-{next(ids)}", "image", parameters)

    return make


def _texts(runtime: Runtime) -> Make:
    assert runtime.texts is not None
    model, ids, device = runtime.texts.model, itertools.count(), runtime.images.model.device.type
    half = runtime.texts.context // 2
    longest = min(_ANSWERS[device][-1], half)

    def make(number: int) -> Request:
        draw = random.Random(number)
        length = draw.randint(4, min(_PROMPT[device], half - 1))
        prompt = tuple(draw.randrange(6, model.vocabulary) for _ in range(length))
        answer = min(longest, draw.choice(_ANSWERS[device]))
        return Request(f"text-{next(ids)}", "text", TextParameters(prompt, answer, temperature=0, ignore_end=True))

    return make


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} s"


def _p99(values: Sequence[float]) -> float | None:
    return round(sorted(values)[math.ceil(0.99 * len(values)) - 1], 5) if values else None
