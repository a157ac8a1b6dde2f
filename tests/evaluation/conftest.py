"""Provides a shell, and runs generated once with the real engine for all tests that read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cli
from evaluation.pixels import Pixels
from pipeline.checkpoints import tiny
from tests.cli.shell import Said, Shell
from tests.core.quant.stage import warm
from tests.evaluation import reward_stand_ins
from tests.shared import shared_folder

CLIP = Path(__file__).resolve().parents[2] / "models" / "emoji-clip"
CAPTIONS = (
    "pizza", "red heart", "cat face", "rocket", "tiger face", "rainbow", "ghost", "banana", "key", "fire", "owl",
)  # fmt: skip
QUICK = f"--model {tiny.TINY} --steps 2 --threads 1 --lens {CLIP} --resamples 10".split()


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, tmp_path, monkeypatch)


def table(folder: Path, captions: tuple[str, ...] = CAPTIONS) -> Path:
    path = folder / "captions.tsv"
    path.write_text("id\tcaption\n" + "".join(f"{k}\t{text}\n" for k, text in enumerate(captions)), "utf-8")
    return path


def evaluate(shell: Shell, words: str, captions: tuple[str, ...] = CAPTIONS) -> Said:
    """What `diptych evaluate` says of these captions, with `QUICK` and these words."""
    return shell("evaluate", "--prompts", str(table(shell.folder, captions)), *QUICK, *words.split())


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def evaluated(folder: Path, name: str, *words: str) -> Path:
    """A run in `folder`, drawn and scored in this process."""
    out = folder / name
    given = ["evaluate", "--prompts", str(table(folder)), "--out", str(out), *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_CACHE_DIR", str(warm(folder.with_name(f"{folder.name}-cache"))))
        assert cli.main(given) == 0
    return out


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small runs of a model with random weights: the base, other seeds, and fewer steps.

    One process draws them. Each has copies, as tests score them again.
    """

    def fill(folder: Path) -> None:
        base = evaluated(folder, "base", *QUICK)
        evaluated(folder, "seeds", *QUICK, "--seed-offset", "1000")
        evaluated(folder, "three", *QUICK, "--steps", "3", "--against", str(base))

    own = tmp_path_factory.mktemp("runs") / "evaluated"
    shutil.copytree(shared_folder(tmp_path_factory, "evaluated", fill), own)
    return {"base": own / "base", "other seeds": own / "seeds", "three steps": own / "three"}


@pytest.fixture(scope="session")
def emoji(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the embedded model, whose pictures show their captions."""
    words = "--steps 6 --guidance 4 --threads 1 --precision fp32 --resamples 10"
    return evaluated(tmp_path_factory.mktemp("emoji"), "xl", *words.split())


def blocks(count: int, size: tuple[int, int]) -> list[Pixels]:
    """Blocks of colour, of width × height."""
    draw = np.random.default_rng(7)
    return [
        np.kron(draw.integers(0, 256, (8, 8, 3)), np.ones((64, 64, 1)))[: size[1], : size[0]].astype(np.uint8)
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DINOv2's architecture with few layers and seeded random weights, whose positions are fitted to 224 pixels."""
    from transformers import Dinov2Config, Dinov2Model

    folder = tmp_path_factory.mktemp("hub") / "dinov2-small-random"
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=70, patch_size=14)
    Dinov2Model(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def image_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_stand_ins.image_reward(tmp_path_factory.mktemp("imagereward"))


@pytest.fixture(scope="session")
def hpsv3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_stand_ins.hpsv3(tmp_path_factory.mktemp("hpsv3"))
