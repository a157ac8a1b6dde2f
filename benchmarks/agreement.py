"""Holds the figures of images against other packages (`tests.evaluation.agreement`), by a Python that has them.

    python -m venv build/agreement/venv
    build/agreement/venv/bin/pip install -e . torchvision torch-fidelity clean-fid open_clip_torch scipy
    git clone https://github.com/mlcommons/inference build/agreement/inference
    diptych evaluate --prompts models/emoji-xl/held-out.tsv --precision int8 --out build/agreement/run
    python -m benchmarks.agreement

torchvision needs the torch that it was built for: the environment is its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import provenance, record

ROOMS = (
    "tests/evaluation/agreement.py", "evaluation/clip.py", "evaluation/fid.py", "evaluation/hub.py",
    "evaluation/inception.py", "evaluation/mmd.py",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=__doc__)
    parser.add_argument("--work", type=Path, default=provenance.ROOT / "build" / "agreement", metavar="DIR")
    work: Path = parser.parse_args().work
    python, mlperf, run = work / "venv" / "bin" / "python", work / "inference", work / "run"
    if missing := [path for path in (python, mlperf, run) if not path.exists()]:
        print(f"there is no {missing[0]}: python -m benchmarks.agreement --help says how to make it", file=sys.stderr)
        return 2
    words = [str(python), "-m", "tests.evaluation.agreement", "--mlperf", str(mlperf), "--run", str(run)]
    done = subprocess.run(words, cwd=provenance.ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        record.publish("agreement", json.loads(done.stdout), rooms=ROOMS, children=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
