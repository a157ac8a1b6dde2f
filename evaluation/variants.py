"""Quality cost of precision and DeepCache: generates a list of captions in many variants, over all cores and a GPU.

`python -m evaluation.variants draw` writes, for each variant, emoji-clip features of its images and each image's PSNR
against fp32; `… score` turns them into a table with intervals. The images themselves are not kept. It works without the
engine, in whole batches: a row's bits do not depend on its batch (tests/pipeline), so the engine's images are the same.
Users have `diptych evaluate`; this is for many variants at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contract.plan import AUTO, BLOCK, RESNET, DeepCache
from unet_opt.recipe import ALPHA

STEPS = 20
_OTHER_SEEDS = 1_000_000
_SAMPLES = 48


class Variant(NamedTuple):
    """One way to generate. `alpha` is SmoothQuant's, 0 for a smoothing scale of 1 (plain INT8); None is fp32.

    `published` is the interval of the DeepCache package's own helper on the stock pipeline.
    """

    alpha: float | None = None
    cached: DeepCache | None = None
    seeds: int = 0
    published: int = 0


PLAIN = 0.0
ON_GPU = {
    "fp32": Variant(),
    "fp32-seeds2": Variant(seeds=1),
    "fp32-seeds3": Variant(seeds=2),
    **{
        f"fp32-{depth}{n}": Variant(cached=DeepCache(n, depth))
        for n in (2, 3, 5)
        for depth in (BLOCK, RESNET)
    },
    **{f"published-{n}": Variant(published=n) for n in (2, 3, 5)},
}  # fmt: skip
ON_CPU = {
    "int8": Variant(ALPHA),
    "int8-auto": Variant(ALPHA, AUTO),
    "int8-plain": Variant(PLAIN),
    **{f"int8-alpha{alpha:g}": Variant(alpha) for alpha in (0.5, 0.3, 0.65)},
    **{
        f"int8-{depth}{n}": Variant(ALPHA, DeepCache(n, depth))
        for n in (2, 3, 5)
        for depth in (BLOCK, RESNET)
    },
}  # fmt: skip

Pixels = NDArray[np.uint8]
Draw = Callable[[Sequence[str], Sequence[int]], Pixels]


class _Cached:
    """A UNet's forward that follows a schedule, for one batch from its first step to its last."""

    def __init__(self, deep: Any, shallow: Any, schedule: DeepCache) -> None:
        self._deep, self._shallow, self._depth = deep, shallow, schedule.depth
        self._plan = schedule.plan(STEPS)
        self._step = 0
        self._features: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        from unet_opt.deepcache import kept

        deep = self._plan[self._step]
        self._step = (self._step + 1) % STEPS
        if not deep:
            return self._shallow(self._depth, self._features, *arguments, **options)  # type: ignore[no-any-return]
        eps, *features = self._deep(*arguments, **options)
        self._features = tuple(feature.clone() for feature in kept(features, self._depth))
        return (eps,)


def _seeds(places: Sequence[int], variant: Variant) -> list[int]:
    return [variant.seeds * _OTHER_SEEDS + place for place in places]


def cpu_draw(model: Path, statistics: Path, cache: Path, variant: Variant) -> Draw:
    """Our own CPU kernels, on one thread."""
    from dataclasses import replace

    import torch

    from core.kernels.cpu.library import library
    from core.quant.convert import quantize_
    from core.quant.statistics import Statistics
    from pipeline import quantized_parts
    from pipeline.drawing import Denoiser
    from pipeline.load import load
    from pipeline.phases import VAE, on_kernels
    from unet_opt import recipe

    kernels = library(cache)
    loaded = load(str(model))
    plain = loaded.digest
    folders = quantized_parts.variant(model, "int8", loaded.family.quantized)
    if variant.alpha is not None:
        quantized_parts.apply_({"vae": loaded.vae}, {"vae": folders["vae"]}, digest=plain)
        made = recipe.unet(loaded.denoiser, alpha=variant.alpha or None)
        quantize_(loaded.denoiser, made, Statistics.load(statistics), digest=plain)
        loaded = replace(loaded, precision="int8")
    networks = on_kernels(loaded, kernels)
    unet = networks.denoiser
    drawing = Denoiser(loaded, unet, steps=STEPS)
    forward = None if variant.cached is None else _Cached(unet.deep, unet.shallow, variant.cached)

    def draw(captions: Sequence[str], places: Sequence[int]) -> Pixels:
        latents = drawing.latents(captions, _seeds(places, variant), forward=forward)
        with torch.inference_mode():
            pixels: Pixels = networks.phases[VAE](latents).numpy()
        return pixels

    return draw


def gpu_draw(model: Path, variant: Variant) -> Draw:
    """torch in fp32 on a GPU, or on the CPU without one."""
    import torch

    from pipeline.drawing import Denoiser
    from pipeline.load import load
    from pipeline.phases import on_torch
    from pipeline.vae import decode

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if variant.published:
        return _published(model, variant, device)
    loaded = load(str(model), device=device)
    split = on_torch(loaded).denoiser
    drawing = Denoiser(loaded, split, steps=STEPS)
    forward = None if variant.cached is None else _Cached(split.deep, split.shallow, variant.cached)

    def draw(captions: Sequence[str], places: Sequence[int]) -> Pixels:
        latents = drawing.latents(captions, _seeds(places, variant), forward=forward)
        pixels: Pixels = decode(loaded, latents).cpu().numpy()
        return pixels

    return draw


def _published(model: Path, variant: Variant, device: str) -> Draw:
    """The DeepCache package's helper (Ma et al.) on the stock pipeline, branch 0, uniform."""
    import torch
    from DeepCache import DeepCacheSDHelper  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(str(model), torch_dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    helper = DeepCacheSDHelper(pipe=pipeline)
    helper.set_params(cache_interval=variant.published, cache_branch_id=0)

    def draw(captions: Sequence[str], places: Sequence[int]) -> Pixels:
        helper.enable()
        try:
            made = pipeline(
                list(captions), num_inference_steps=STEPS, guidance_scale=5.0, output_type="np",
                generator=[torch.Generator().manual_seed(seed) for seed in _seeds(places, variant)],
            ).images  # fmt: skip
        finally:
            helper.disable()
        return (made * 255).round().astype(np.uint8)  # type: ignore[no-any-return]

    return draw


class _Store:
    """Images of the variants as pixel files that several processes write concurrently."""

    def __init__(self, folder: Path, captions: int, side: int) -> None:
        self._folder, self._shape = folder, (captions, side, side, 3)
        folder.mkdir(parents=True, exist_ok=True)

    def pixels(self, name: str) -> Any:
        path = self._folder / f"{name}.npy"
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=self._shape).flush()
            with suppress(FileExistsError):
                os.link(partial, path)
            partial.unlink()
        return np.lib.format.open_memmap(path, mode="r+")

    def done(self, name: str) -> list[int]:
        """Finished positions."""
        return sorted(
            place for path in self._folder.glob(f"{name}.*.done") for place in json.loads(path.read_text("utf-8"))
        )

    def note(self, name: str, process: int, places: Sequence[int]) -> None:
        path = self._folder / f"{name}.{process}.done"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(list(places)), "utf-8")
        partial.replace(path)


def _work(process: int, of: int, options: argparse.Namespace, captions: list[str], until: float) -> None:
    """One process's share of every variant, in turn; the first one runs the GPU's variants. Resumable."""
    import torch

    torch.set_num_threads(1)
    store = _Store(options.work, len(captions), options.side)
    places = range(len(captions))
    if of == 1:
        variants, batch = ON_GPU | ON_CPU, options.batch
    elif process == 0:
        variants, batch = ON_GPU, options.gpu_batch
    else:
        variants, batch, places = ON_CPU, options.batch, places[process - 1 :: of - 1]
    for name, variant in variants.items():
        if options.only and name not in options.only:
            continue
        drawn = set(store.done(name))
        left = [place for place in places if place not in drawn]
        if not left or time.time() > until:
            continue
        draw, pixels, noted = _draw_of(options, variant), store.pixels(name), [p for p in places if p in drawn]
        started = time.perf_counter()
        for start in range(0, len(left), batch):
            if time.time() > until:
                return
            some = left[start : start + batch]
            pixels[some] = draw([captions[place] for place in some], some)
            noted += some
            store.note(name, process, noted)
        took = time.perf_counter() - started
        print(f"{process}: {name}, {len(left)} pictures in {took:.0f} s", flush=True)


def _draw_of(options: argparse.Namespace, variant: Variant) -> Draw:
    """The function that draws this variant: torch's own on a GPU, else our CPU kernels."""
    import torch

    if variant.published or (variant.alpha is None and torch.cuda.is_available()):
        return gpu_draw(options.model, variant)
    return cpu_draw(options.model, options.statistics, options.cache, variant)


def draw(options: argparse.Namespace) -> None:
    captions: list[str] = json.loads(options.captions.read_text("utf-8"))[: options.limit]
    until = time.time() + options.seconds
    spawn = multiprocessing.get_context("spawn")
    shares = [
        spawn.Process(target=_work, args=(process, options.processes, options, captions, until))
        for process in range(options.processes)
    ]
    for share in shares:
        share.start()
    for share in shares:
        share.join()
    _look(options, captions)


def _look(options: argparse.Namespace, captions: list[str]) -> None:
    """Features and PSNR of every complete variant, into `out`; and the first images of each."""
    import torch

    from evaluation.clip import Clip

    torch.set_num_threads(options.processes)
    store = _Store(options.work, len(captions), options.side)
    clip = Clip(options.clip, device="cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    exact = store.pixels("fp32") if len(store.done("fp32")) == len(captions) else None
    made: dict[str, Any] = {}
    for name in ON_GPU | ON_CPU:
        if len(store.done(name)) < len(captions):
            continue
        pixels = store.pixels(name)
        made[f"{name}/features"] = clip.see(pixels).numpy()
        if exact is not None:
            made[f"{name}/psnr"] = _psnr(exact, pixels)
        made[f"{name}/samples"] = np.array(pixels[:: max(1, len(captions) // _SAMPLES)][:_SAMPLES])
    kinds = ("features", "psnr", "samples")
    for kind in kinds:
        found = {name: value for name, value in made.items() if name.endswith(f"/{kind}")}
        half = len(found) // 2
        for part, names in enumerate((list(found)[:half], list(found)[half:])):
            np.savez_compressed(options.out / f"{kind}-{part}.npz", **{name: found[name] for name in names})
    print(f"whole: {', '.join(sorted({name.partition('/')[0] for name in made}))}", flush=True)


def _psnr(exact: Pixels, pixels: Pixels) -> NDArray[np.float32]:
    """dB of each picture, 99 for equal ones."""
    error = np.array(
        [np.square(a.astype(np.int32) - b).mean() for a, b in zip(exact, pixels, strict=True)], dtype=np.float64
    )
    db: NDArray[np.float32] = np.minimum(99, 10 * np.log10(255**2 / np.maximum(error, 1e-9))).astype(np.float32)
    return db


def score(options: argparse.Namespace) -> dict[str, Any]:
    """FID and caption score with 95% intervals, and paired ones of the difference and the ratio to fp32.

    `real` holds the real images. Also the FID between the two halves of these: the effect of the choice of images
    alone.
    """
    import torch

    from evaluation import bootstrap, fid, pixels
    from evaluation.clip import Clip

    captions: list[str] = json.loads(options.captions.read_text("utf-8"))
    found: dict[str, Any] = {}
    for path in sorted(options.out.glob("*.npz")):
        with np.load(path) as opened:
            found |= {name: opened[name] for name in opened.files if not name.endswith("/samples")}
    counts = bootstrap.resamples(len(captions), options.resamples)
    clip = Clip(options.clip)
    real = clip.see([pixels.read(path) for path in sorted(options.real.glob("*.png"))])
    text = clip.read(captions)
    distance_to = fid.FrechetDistance(real)
    figures: dict[str, tuple[bootstrap.Estimate, bootstrap.Estimate]] = {}
    for name in ON_GPU | ON_CPU:
        if f"{name}/features" not in found:
            continue
        features = torch.from_numpy(found[f"{name}/features"]).float()
        drawn = torch.tensor([distance_to(features, row) for row in counts], dtype=torch.float64)
        distances = bootstrap.Estimate(distance_to(features), drawn)
        figures[name] = distances, bootstrap.mean(100 * (features * text).sum(1), counts)
    rows = {}
    exact = figures["fp32"]
    for name, (distance, score) in figures.items():
        psnr = found.get(f"{name}/psnr")
        rows[name] = {
            "fid": distance.interval, "clip": score.interval,
            "fid_more": bootstrap.Estimate(
                distance.value - exact[0].value, distance.drawn - exact[0].drawn
            ).interval,
            "clip_ratio": score.over(exact[1]).interval,
            "psnr_db": None if psnr is None else float(np.median(psnr)),
        }  # fmt: skip
    return {
        "model": options.model.resolve().name, "captions": len(captions), "steps": STEPS,
        "halves_fid": fid.FrechetDistance(real[1::2])(real[::2]), "variants": rows,
    }  # fmt: skip


def main() -> None:
    models = Path(__file__).resolve().parent.parent / "models"
    parser = argparse.ArgumentParser(prog="python -m evaluation.variants", description=__doc__)
    parser.add_argument("what", choices=("draw", "score"))
    parser.add_argument("--captions", type=Path, required=True, help="a JSON list")
    parser.add_argument("--out", type=Path, required=True, help="for what draw leaves and score reads")
    parser.add_argument("--model", type=Path, default=models / "emoji-xl")
    parser.add_argument("--clip", type=Path, default=models / "emoji-clip")
    parser.add_argument("--side", type=int, default=128, help="of the model's pictures, in pixels")
    parser.add_argument("--statistics", type=Path, help="of the model's calibration, for draw")
    parser.add_argument("--work", type=Path, help="for pixels, while draw is at it")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/diptych/kernels").expanduser())
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--gpu-batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which draw begins no more batches")
    parser.add_argument("--only", nargs="*", choices=[*ON_GPU, *ON_CPU], help="variants")
    parser.add_argument("--limit", type=int, help="of captions")
    parser.add_argument("--real", type=Path, help="a folder of the real pictures, for score (training.real)")
    parser.add_argument("--resamples", type=int, default=100)
    options = parser.parse_args()
    if options.what == "draw":
        if options.work is None or options.statistics is None:
            parser.error("draw needs --work and --statistics")
        draw(options)
    else:
        if options.real is None:
            parser.error("score needs --real")
        print(json.dumps(score(options), indent=1))


if __name__ == "__main__":
    main()
