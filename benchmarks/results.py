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
OTHERS = ("agreement",)  # needs other packages
NAMES = (*RUNS, *OTHERS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument("--work", type=Path, default=_ROOT / "build", help="for what is made on the way")
    parser.add_argument("--only", metavar="NAME,…", help=f"those whose names begin so, of {', '.join(NAMES)}")
    options = parser.parse_args(arguments)
    begins = tuple((options.only or "").split(","))
    names = [name for name in NAMES if name.startswith(begins)]
    if any(not name or not any(choice.startswith(name) for choice in NAMES) for name in begins if options.only):
        parser.error(f"--only: there is no {options.only}; there are {', '.join(NAMES)}")
    failed = [name for name in names if not _measured(name, options.work)]
    _run("-m", "benchmarks.figures")
    if failed:
        record.progress(f"not measured: {', '.join(failed)}")
    return int(bool(failed))


def _measured(name: str, work: Path) -> bool:
    """Run one benchmark, which prints its progress; returns whether it succeeded."""
    record.progress(f"== {name}")
    if name == "agreement":
        return run_agreement(work / "agreement")
    return _run(*RUNS[name]) is not None


def run_agreement(work: Path) -> bool:
    """Hold the figures of images against other packages', by a Python that has these: see docs/evaluation.md."""
    python, mlperf, run = work / "venv" / "bin" / "python", work / "inference", work / "run"
    if missing := [path for path in (python, mlperf, run) if not path.exists()]:
        record.progress(f"there is no {missing[0]}: docs/evaluation.md says how to make it")
        return False
    output = _run("-m", "tests.evaluation.agreement", "--mlperf", str(mlperf), "--run", str(run), python=str(python))
    names = (
        "tests/evaluation/agreement",
        *(f"evaluation/{name}" for name in ("clip", "fid", "hub", "inception", "mmd")),
    )
    return _stored("agreement", output, [f"{name}.py" for name in names])


def _stored(name: str, output: str | None, artifacts: Sequence[str]) -> bool:
    """Store what a child process printed."""
    if output is not None:
        record.publish(name, json.loads(output), artifacts=artifacts, verbose=False)
    return output is not None


def _run(*arguments: str, python: str = sys.executable) -> str | None:
    """Run Python with these arguments; returns its stdout, or None where it fails."""
    record.progress(f"python {' '.join(arguments)}")
    done = subprocess.run([python, *arguments], cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False)
    return None if done.returncode else done.stdout


if __name__ == "__main__":
    sys.exit(main())
