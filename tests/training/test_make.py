"""`make train` from one end to the other, smoke-sized: the command that a reader of the README would type."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_make_train_leaves_every_model(data: Path, tmp_path: Path) -> None:
    more = "--shape smoke --size 32 --iterations 1 --batch 2 --held-out 3 --variants 2 --no-judge --threads 1"
    told = [f"DATA={data}", f"WORK={tmp_path / 'work'}", f"MODELS={tmp_path / 'models'}", f"MORE={more}"]
    # -o: the environment that runs this test is the one to train in, however old its stamp.
    command = ["make", "-o", ".venv/.installed", "train", *told]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("emoji-xl", "emoji-z", "emoji-clip", "emoji-lm", "emoji-lm-draft"):
        assert any((tmp_path / "models" / name).rglob("*.safetensors")), name
