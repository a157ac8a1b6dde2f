"""Runs the benchmarks that the docs cite, one after the other, and updates the docs (`make results`).

Each benchmark stores its own JSON file with provenance; this module lists their options.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import provenance, record

_ROOT = provenance.ROOT
_EVERY = 25  # of the captions calibrate
_WHOLE = ("fp32", "fp32-seeds2", "fp32-seeds3", "int8", "int8-auto")  # drawn with all captions
_SWEPT = 32  # every so many captions are drawn in all ways
_PUBLISHED = 64  # of these, one at a time beside published helpers
_LOADS = "0.3,0.5,0.6,0.7,0.8,0.9,0.95"
_MIXED = "--steps 12,20,30,50 --deepcache off,2"
_FLEET = "--costs h200 --load 0.8"

_BENCHES = {
    "ladder": "ladder --rungs diffusers,diffusers-static-batch,step-batching,+kernels,+int8,+deepcache",
    "arrivals": "arrivals --deepcache auto --pictures 80",
    "serve": "serve --pictures 300",
    "text-emoji-lm": "text --text-model models/emoji-lm --text-draft models/emoji-lm-draft --turns 2",
    "text-llama-100m": "text --text-model random:llama-100m --turns 1 --requests 32",
    "cohost": "cohost",
    "peers": "peers",
    "simulate-h200": f"simulate --costs h200 --load {_LOADS}",
    "simulate-h200-deepcache": f"simulate --costs h200 --load {_LOADS} --deepcache 2",
    "simulate-h200-mixed": f"simulate --costs h200 --load 0.5,0.7,0.8,0.9 {_MIXED} --pictures 10000",
    "simulate-h200-bursts": "simulate --costs h200 --load 0.2,0.4,0.6 --bursts 5,15 --pictures 10000",
    "simulate-cpu": f"simulate --costs cpu --load {_LOADS}",
    "simulate-cpu-auto": "simulate --costs cpu --load 0.3,0.5,0.7,0.8,0.9,0.95,2 --deepcache auto --pictures 10000",
    "simulate-fleet": f"simulate {_FLEET} --gpus 1,8,64,1000 --pictures 100000",
    "simulate-fleet-mixed": f"simulate {_FLEET} --gpus 1,8,64,1000 --pictures 40000 {_MIXED}",
    "simulate-fleet-mixed-4": f"simulate {_FLEET} --gpus 8,64 --pictures 40000 {_MIXED} --image-jobs 4",
    "simulate-fleet-mixed-2": f"simulate {_FLEET} --gpus 8,64 --pictures 40000 {_MIXED} --image-jobs 2",
}
RUNS: dict[str, list[str]] = {
    name: ["-m", "cli", "bench", *words.split(), *(["--name", name] if name.startswith("simulate") else [])]
    for name, words in _BENCHES.items()
}
RUNS["scheduling"] = ["-m", "benchmarks.scheduling"]
RUNS["chaos"] = ["-m", "tests.faults.chaos"]
RUNS["neighbours"] = ["-m", "tests.faults.neighbours"]
RUNS["agreement"] = ["-m", "benchmarks.agreement"]
RUNS["hostile"] = ["-m", "tests.faults.hostile", "--bodies", "10000"]
QUALITY = ("quality", "sweep")  # need data; hours
DATA = ("published", *QUALITY)
NAMES = (*RUNS, *DATA)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder with emoji/captions.tsv and emoji/images.zip")
    parser.add_argument("--work", type=Path, default=_ROOT / "build" / "results", help="for what is made on the way")
    parser.add_argument("--only", metavar="NAME,…", help=f"those whose names begin so, of {', '.join(NAMES)}")
    options = parser.parse_args()
    wanted = tuple((options.only or "").split(","))
    names = [name for name in NAMES if name.startswith(wanted)]
    if any(not name or not any(known.startswith(name) for known in NAMES) for name in wanted if options.only):
        parser.error(f"--only: there is no {options.only}; there are {', '.join(NAMES)}")
    if options.data is None and set(names) & set(DATA):
        parser.error(f"--data: is needed for {', '.join(DATA)}; --only leaves them out")
    failed = [name for name in names if name in RUNS and not _measured(name)]
    options.work.mkdir(parents=True, exist_ok=True)
    if "published" in names:
        published(options.data, options.work)
    if drawn := [name for name in QUALITY if name in names]:
        quality(options.data, options.work, drawn)
    _run("-m", "benchmarks.figures")
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def published(data: Path, work: Path) -> None:
    """Draw some captions by the engine's plans and by the published helpers that are installed."""
    captions = work / "published.json"
    captions.write_text(json.dumps(_captions(data)[::_SWEPT][:_PUBLISHED]), "utf-8")
    with record.alone():
        found = json.loads(_run("-m", "evaluation.published", "--captions", str(captions)))
    rooms = (*provenance.IMAGES, "evaluation/published.py", "evaluation/stock.py", "models/emoji-clip")
    record.write("published", found, rooms=rooms)


def quality(data: Path, work: Path, names: list[str]) -> None:
    """Generate and score all captions with a few variants and some captions with all variants; resumes."""
    from pipeline.load import load
    from pipeline.quantized import watch
    from unet_opt.calibrate import CalibrationSettings

    captions = _captions(data)
    if not (work / "real").is_dir():
        _run("-m", "training.real", "--data", str(data), "--out", str(work / "real"))
    shipped = CalibrationSettings(guidance=5.0)  # as the scales in models/emoji-xl were made: 5 suits the model
    model = load(str(_ROOT / "models" / "emoji-xl"))
    watch(model, captions[::_EVERY], work / "statistics.safetensors", settings=shipped)
    for name in names:
        asked, only = (captions, ("--only", *_WHOLE)) if name == "quality" else (captions[::_SWEPT], ())
        folder = work / name
        folder.mkdir(exist_ok=True)
        (folder / "captions.json").write_text(json.dumps(asked), "utf-8")
        shared = ("--captions", str(folder / "captions.json"), "--out", str(folder / "drawn"))
        more = ("--work", str(folder / "pixels"), "--statistics", str(work / "statistics.safetensors"))
        _run("-m", "evaluation.variants", "draw", *shared, *more, *only)
        found = json.loads(_run("-m", "evaluation.variants", "score", *shared, "--real", str(work / "real")))
        rooms = (*provenance.IMAGES, "evaluation/variants.py", "models/emoji-clip")
        record.write(name, found, rooms=rooms)


def _captions(data: Path) -> list[str]:
    from pipeline.prompts import read

    return [prompt.text for prompt in read(data / "emoji" / "captions.tsv", columns=("name",), names=())]


def _measured(name: str) -> bool:
    """Run one benchmark, which prints its progress; returns whether it succeeded."""
    print(f"== {name}: python {' '.join(RUNS[name])}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, *RUNS[name]], cwd=_ROOT, check=False).returncode == 0


def _run(*arguments: str) -> str:
    """Run Python with these arguments, and return its stdout. Exits if it fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"python {' '.join(arguments)}: failed with exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
