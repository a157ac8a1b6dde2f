"""Runs the benchmarks that the docs cite, one after the other, and updates the docs (`make results`).

Without `--all` or `--only` it lists them: name, commit and date of the stored file, and the minutes that it took then.
Each benchmark stores its own JSON file with provenance; this module lists their options, those of a GPU (`--gpu`) too.
`lab/training/ways.sh` measures `ways`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from lab.bench.harness import provenance, record

_ROOT = provenance.ROOT
_RESULTS, _GPU_RESULTS = _ROOT / "lab/bench/results", _ROOT / "lab/bench/results/h200"
_LADDER = "--pictures 64 --rungs diffusers,step-batching,+int8,+deepcache,+plan,turbo"
_EMOJI_LM = "--text-model models/emoji-lm --text-draft models/emoji-lm-draft"
_FLEET = "--costs h200 --load 0.8 --pictures 40000 --steps 12,20,30,50 --deepcache off,2"

_BENCHES = {
    "ladder": f"ladder {_LADDER}",
    "ladder-avx2": f"ladder --instructions avx2 {_LADDER}",
    "arrivals": "arrivals --deepcache auto --pictures 80",
    "serve": "serve --pictures 300",
    "text-emoji-lm": f"text {_EMOJI_LM} --rungs diptych-user,diptych-user-speculative --turns 9",
    "text-llama-100m": "text --text-model random:llama-100m --turns 1 --requests 32",
    "cohost": "cohost",
    "simulate-h200": "simulate --costs h200 --load 0.3,0.5,0.6,0.7,0.8,0.9,0.95",
    "simulate-h200-bursts": "simulate --costs h200 --load 0.2,0.4,0.6 --bursts 5,15 --pictures 10000",
    "simulate-fleet": f"simulate {_FLEET} --gpus 1,8,64,1000",
    "simulate-fleet-jobs": f"simulate {_FLEET} --gpus 1,8,64 --image-jobs 4",
}
RUNS: dict[str, list[str]] = {
    **{name: ["-m", "cli", "bench", *words.split(), *(["--name", name] if name.startswith("simulate") else [])]
       for name, words in _BENCHES.items()},
    "rivals": ["-m", "lab.bench.rivals", "--openvino", "build/openvino/bin/python"],
    "scheduling": ["-m", "lab.bench.scheduling"],
    "neighbours": ["-m", "tests.lab.faults.neighbours", "--rounds", "100"],
    "hostile": ["-m", "tests.lab.faults.hostile", "--bodies", "5000"],
}  # fmt: skip
GPU_RUNS: dict[str, list[str]] = {
    name: ["-m", f"lab.bench.{module}", *words.split()]
    for name, module, words in (
        ("engine", "engine", "--windows 1 --window 12"),
        ("stock", "stock", "--modes eager,compiled"),
        ("phases", "phases", ""),
        ("fleet", "fleet", "--gpus 4,2,1 --plans full,half,4-steps --apis 4 --engine --window 30 --warm 14"),
        ("text-load", "text_load", "--loads 256:128/128,64:128/128,1:128/256,256:1000/1000:1"),
        (
            "text-load-server",
            "text_load",
            "--loads 256:780/73:2@30,256:780/73:2@45,256:780/73:2@55 --pace 0.03 --name text-load-server",
        ),
    )
}  # fmt: skip
"""On one GPU, and `fleet` on four. Each stores its file in `lab/bench/results/h200`; `fleet` also `fleet-engine`."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.results", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="those of a GPU, in place of those of a CPU")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="run all of them, which takes hours on an idle machine")
    which.add_argument("--only", metavar="NAME,…", help="run those whose names begin so")
    parser.add_argument("--results", metavar="DIR", help="where the JSON of a GPU's goes")
    options = parser.parse_args(arguments)
    runs = GPU_RUNS if options.gpu else RUNS
    stored = Path(options.results) if options.gpu and options.results else _GPU_RESULTS if options.gpu else _RESULTS
    if not options.all and options.only is None:
        print(*listed(runs, stored), sep="\n")
        print("\n--all runs all of them, --only NAME,… some", file=sys.stderr)
        return 0
    begins = tuple((options.only or "").split(","))
    names = [name for name in runs if name.startswith(begins)]
    if any(not name or not any(choice.startswith(name) for choice in runs) for name in begins if not options.all):
        parser.error(f"--only: there is no {options.only}; there are {', '.join(runs)}")
    folder = ["--results", options.results] if options.gpu and options.results else []
    failed = [name for name in names if not _measured(name, [*runs[name], *folder], stored / f"{name}.json")]
    _run("-m", "lab.bench.figures")
    if failed:
        record.progress(f"not measured: {', '.join(failed)}")
    return int(bool(failed))


def listed(names: Iterable[str], folder: Path) -> list[str]:
    """Return a line for each benchmark: its name, the commit and date of its file, and the minutes that it took."""
    columns = ("commit", "date", "minutes")
    rows: list[tuple[str, ...]] = [("name", *columns)]
    for name in names:
        path = folder / f"{name}.json"
        about = json.loads(path.read_text("utf-8"))["provenance"] if path.exists() else {}
        values = (about.get(key) for key in columns)
        rows.append((name, *("-" if value is None else str(value) for value in values)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _measured(name: str, words: Sequence[str], path: Path) -> bool:
    """Run one benchmark, which prints its progress and stores its result, to which the minutes that it took are added.
    Return whether it succeeded.
    """
    record.progress(f"== {name}")
    started = time.monotonic()
    if not _run(*words):
        return False
    note_minutes(path, (time.monotonic() - started) / 60)
    return True


def note_minutes(path: Path, minutes: float) -> None:
    """Add to a stored result how long it took."""
    result = json.loads(path.read_text("utf-8"))
    result["provenance"]["minutes"] = round(minutes, 1)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def _run(*arguments: str) -> bool:
    """Run Python with these arguments; returns whether that succeeded."""
    record.progress(f"python {' '.join(arguments)}")
    done = subprocess.run([sys.executable, *arguments], cwd=_ROOT, stdout=subprocess.DEVNULL, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
