"""Runs the benchmarks that the docs cite, one after the other, and updates the docs (`make results`).

Each benchmark stores its own JSON file with provenance; this module lists their options.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.harness import provenance, record

_ROOT = provenance.ROOT
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
    **{name: ["-m", "cli", "bench", *words.split(), *(["--name", name] if name.startswith("simulate") else [])]
       for name, words in _BENCHES.items()},
    "scheduling": ["-m", "benchmarks.scheduling"],
    "weights": ["-m", "benchmarks.weights", "quality", "--device", "cpu", "--captions", "data/coco/captions_source.tsv",
                "--results", "benchmarks/results"],
    "neighbours": ["-m", "tests.faults.neighbours"],
    "hostile": ["-m", "tests.faults.hostile", "--bodies", "10000"],
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--only", metavar="NAME,…", help=f"those whose names begin so, of {', '.join(RUNS)}")
    options = parser.parse_args(arguments)
    begins = tuple((options.only or "").split(","))
    names = [name for name in RUNS if name.startswith(begins)]
    if any(not name or not any(choice.startswith(name) for choice in RUNS) for name in begins if options.only):
        parser.error(f"--only: there is no {options.only}; there are {', '.join(RUNS)}")
    failed = [name for name in names if not _measured(name)]
    _run("-m", "benchmarks.figures")
    if failed:
        record.progress(f"not measured: {', '.join(failed)}")
    return int(bool(failed))


def _measured(name: str) -> bool:
    """Run one benchmark, which prints its progress and stores its result; returns whether it succeeded."""
    record.progress(f"== {name}")
    return _run(*RUNS[name])


def _run(*arguments: str) -> bool:
    """Run Python with these arguments; returns whether that succeeded."""
    record.progress(f"python {' '.join(arguments)}")
    done = subprocess.run([sys.executable, *arguments], cwd=_ROOT, stdout=subprocess.DEVNULL, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
