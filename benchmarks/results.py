"""Runs the benchmarks that the docs cite, one after the other, and updates the docs (`make results`).

Each benchmark stores its own JSON file with provenance; this module lists their options.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import provenance, record

_ROOT = provenance.ROOT
_EVERY, _PUBLISHED = 32, 64  # every so many captions, and so many of these, are drawn beside published helpers
_LOADS = "0.3,0.5,0.6,0.7,0.8,0.9,0.95"
_MIXED = "--steps 12,20,30,50 --deepcache off,2"
_LADDER = "--pictures 64 --compile-limit 60 --rungs diffusers,step-batching,+int8,+deepcache,+plan,turbo"
_FLEET = "--costs h200 --load 0.8"

_BENCHES = {
    "ladder": f"ladder {_LADDER}",
    "ladder-avx2": f"ladder --instructions avx2 {_LADDER}",
    "arrivals": "arrivals --deepcache auto --pictures 80",
    "serve": "serve --pictures 300",
    "text-emoji-lm": "text --text-model models/emoji-lm --text-draft models/emoji-lm-draft --turns 2",
    "text-llama-100m": "text --text-model random:llama-100m --turns 1 --requests 32",
    "cohost": "cohost",
    "peers": "peers",
    "lora-load": "lora-load --threads 1 --rounds 4 --steps 60",
    "control": "control --threads 1",
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
RUNS["layer-errors"] = ["-m", "benchmarks.layer_errors"]
RUNS["hostile"] = ["-m", "tests.faults.hostile", "--bodies", "10000"]
DATA = ("published", "ways")  # need data; an hour
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
    _of_data(names, options.data, options.work)
    _run("-m", "benchmarks.figures")
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _of_data(names: Sequence[str], data: Path, work: Path) -> None:
    """Measure those of these that need the training's data."""
    if "published" in names:
        published(data, work)
    if "ways" in names:
        _run("-m", "benchmarks.ways", "--data", str(data), "--work", str(work / "ways"))


def published(data: Path, work: Path) -> None:
    """Draw some captions by the engine's plans and by the published helpers that are installed."""
    captions = work / "published.json"
    captions.write_text(json.dumps(_captions(data)[::_EVERY][:_PUBLISHED]), "utf-8")
    with record.alone():
        found = json.loads(_run("-m", "tests.evaluation.published", "--captions", str(captions)))
    rooms = (*provenance.IMAGES, "tests/evaluation/published.py", "tests/evaluation/stock.py", "models/emoji-clip")
    record.write("published", found, rooms=rooms, children=True)


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
