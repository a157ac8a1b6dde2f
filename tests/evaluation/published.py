"""Compares the engine's plans with published helpers on the stock pipeline: `python -m tests.evaluation.published`.

All draw the same captions from the same noise in fp32 on one thread of a CPU, one picture at a time, in turns. Prompts
are encoded before: no helper changes that. Prints JSON: for each contender its seconds and floating-point operations a
picture, and PSNR, SSIM and caption score beside the stock pipeline's full pictures.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contract import tuned
from contract.image import ImageParameters
from contract.plan import AUTO, BLOCK, RESNET, DeepCache, to_field
from core.batching.request import Request
from core.batching.runner import Lane
from core.config import Settings
from evaluation import bootstrap, pairs
from evaluation.clip import Clip
from evaluation.pixels import Pixels
from pipeline import plans
from tests.evaluation import stock
from tests.evaluation.stock import FULL
from workers.build import Runtime, build

STEPS, GUIDANCE = 20, 5.0
HALF = [0.0, 0.5]
OURS = "diptych-"
TUNED = OURS + tuned.BALANCED
PLANS: dict[str, Mapping[str, Any]] = {
    OURS + FULL: {},
    **{
        f"{OURS}{depth}{interval}": {"deepcache": to_field(DeepCache(interval, depth))}
        for interval in (2, 3)
        for depth in (BLOCK, RESNET)
    },
    f"{OURS}auto": {"deepcache": to_field(AUTO)},
    f"{OURS}gate": {"guidance_interval": HALF},
    f"{OURS}auto-gate": {"deepcache": to_field(AUTO), "guidance_interval": HALF},
}
"""Plans by name, as request fields; beside them `TUNED`, the model's own of `diptych tune` in INT8."""
PACKAGES = ("torch", "diffusers", "DeepCache", "tgate")
_TURN = 8  # captions of a contender until the next one has its turn

Draw = Callable[[str, int], Pixels]
"""Draws a prompt and a seed."""


class Engine:
    """An engine that draws one picture at a time."""

    def __init__(self, works: Runtime) -> None:
        self._works = works
        native = works.images.model.native
        self._draft = ImageParameters("", 0, native, native, steps=STEPS, guidance_scale=GUIDANCE)

    def encode(self, prompt: str) -> None:
        """Have the engine remember the prompt's embedding, which it does for some hundreds."""
        self.drawn_by({"steps": 1})(prompt, 0)

    def drawn_by(self, fields: Mapping[str, Any]) -> Draw:
        def draw(prompt: str, seed: int) -> Pixels:
            wanted = self._draft.planned({**fields, "prompt": prompt, "seed": seed})
            made: Any = self._works.engine.submit(Request(secrets.token_hex(8), "image", wanted)).result()
            return np.asarray(made.image)

        return draw


def compare(
    settings: Settings,
    captions: Sequence[str],
    clip: Clip,
    only: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All contenders, or the stock pipeline and `only` these. `settings` name a folder."""
    folder = Path(settings.model_name)
    lane = Lane("pictures")  # all compute on one thread: see Lane
    with build(settings, lane=lane) as works:
        engine, (draws, left_out) = Engine(works), _helped(folder, captions, lane, only)
        draws |= {name: engine.drawn_by(fields) for name, fields in _plans(folder).items() if not only or name in only}
        took, pictures = _in_turns(draws, captions, engine, say)
        operations = {name: _operations(lane, draws[name], captions[0]) for name in draws if not name.startswith(OURS)}
        threads = lane.call(torch.get_num_threads)
    operations |= _own_operations(settings, [name for name in draws if name.startswith(OURS)], captions[0])
    full = {name: statistics.median(took[OURS + FULL if name.startswith(OURS) else FULL]) for name in draws}
    scores, counts = _scores(clip, captions, pictures), bootstrap.resamples(len(captions))
    exact = bootstrap.mean(scores[FULL], counts)
    contenders = {}
    for name in draws:
        beside = [(pairs.psnr(a, b), pairs.ssim(a, b)) for a, b in zip(pictures[FULL], pictures[name], strict=True)]
        low, median, high = statistics.quantiles(took[name], n=4, method="inclusive")
        contenders[name] = {
            "seconds": median, "quartiles_s": [low, high], "of_full": median / full[name],
            "operations": operations[name] / operations[FULL],
            "psnr_db": statistics.fmean(psnr for psnr, _ in beside),
            "ssim": statistics.fmean(ssim for _, ssim in beside),
            "clip_ratio": bootstrap.mean(scores[name], counts).over(exact).interval,
        }  # fmt: skip
    return {
        "model": folder.name, "captions": len(captions), "steps": STEPS, "guidance": GUIDANCE, "threads": threads,
        "contenders": contenders, "left_out": left_out, "kernels": works.images.backend.kernels.name,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }  # fmt: skip


def _helped(
    folder: Path, captions: Sequence[str], lane: Lane, only: Sequence[str]
) -> tuple[dict[str, Draw], dict[str, str]]:
    """What draws with each helper, and the reasons of those that are left out."""
    pipeline = lane.call(lambda: stock.StockPipeline(folder, steps=STEPS, guidance=GUIDANCE))
    for caption in captions:
        lane.call(lambda caption=caption: pipeline.encode(caption))  # type: ignore[misc]
    draws: dict[str, Draw] = {}
    left_out = {}
    for name, make in stock.HELPERS.items():
        if only and name not in (FULL, *only):
            continue
        try:
            draws[name] = _on(lane, pipeline.helped(make))
        except stock.Missing as error:
            left_out[name] = str(error)
    return draws, left_out


def _on(lane: Lane, draw: Draw) -> Draw:
    return lambda prompt, seed: lane.call(lambda: draw(prompt, seed))


def _plans(folder: Path) -> dict[str, Mapping[str, Any]]:
    found = plans.read(folder / plans.FILE, "int8")
    return {**PLANS, **({TUNED: found[tuned.BALANCED]} if tuned.BALANCED in found else {})}


def _in_turns(
    draws: Mapping[str, Draw], captions: Sequence[str], engine: Engine, say: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[Pixels]]]:
    """Seconds and pictures of each contender: a shared machine's speed changes, so that all have turns."""
    took: dict[str, list[float]] = {name: [] for name in draws}
    pictures: dict[str, list[Pixels]] = {name: [] for name in draws}
    for start in range(0, len(captions), _TURN):
        turn = captions[start : start + _TURN]
        for caption in turn:
            engine.encode(caption)
        for name, draw in draws.items():
            draw(turn[0], start)  # its weights are in the processor's caches then, as in serving
            for seed, caption in enumerate(turn, start):
                started = time.perf_counter()
                pictures[name].append(draw(caption, seed))
                took[name].append(time.perf_counter() - started)
        say(f"{start + len(turn)} of {len(captions)} captions")
    return took, pictures


def _operations(lane: Lane, draw: Draw, caption: str) -> int:
    """Floating-point operations of one picture, of all matrix products and convolutions that torch computes."""
    with _counting(lane) as count:
        draw(caption, 0)
        return count()


def _own_operations(settings: Settings, names: Sequence[str], caption: str) -> dict[str, int]:
    """The same of the engine's plans. Torch computes them here: it cannot count in our kernels."""
    lane, wanted = Lane("counted"), settings.model_copy(update={"kernels": False, "compile": False})
    with build(wanted, lane=lane) as works:
        engine, fields = Engine(works), _plans(Path(settings.model_name))
        engine.encode(caption)
        return {name: _operations(lane, engine.drawn_by(fields[name]), caption) for name in names}


@contextmanager
def _counting(lane: Lane) -> Iterator[Callable[[], int]]:
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    lane.call(counter.__enter__)  # modes are a thread's own
    try:
        yield counter.get_total_flops
    finally:
        lane.call(lambda: counter.__exit__(None, None, None))


def _scores(clip: Clip, captions: Sequence[str], pictures: Mapping[str, Sequence[Pixels]]) -> dict[str, torch.Tensor]:
    text = clip.read(captions).double()
    return {name: 100 * (clip.see(found).double() * text).sum(1) for name, found in pictures.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    models = Path(__file__).resolve().parents[2] / "models"
    parser = argparse.ArgumentParser(prog="python -m tests.evaluation.published", description=__doc__)
    parser.add_argument("--captions", type=Path, required=True, help="a JSON list")
    parser.add_argument("--model", type=Path, default=models / "emoji-xl", help="a folder")
    parser.add_argument("--clip", type=Path, default=models / "emoji-clip")
    parser.add_argument("--cache", type=Path, help="of compiled kernels")
    parser.add_argument("--threads", type=int, default=1, help="default: 1, which other processes disturb least")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="contenders beside the full plan")
    options = parser.parse_args()
    # Nothing is compiled beside what is timed: our kernels need it not, and the helpers have none.
    words: dict[str, Any] = {"device": "cpu", "threads": options.threads, "compile": False}
    settings = Settings(model=str(options.model), precision="fp32", **words)
    if options.cache is not None:
        settings = settings.model_copy(update={"cache_dir": options.cache})
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    captions = json.loads(options.captions.read_text("utf-8"))
    found = compare(
        settings, captions, Clip(options.clip), options.only, lambda text: console.print(text, markup=False)
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
