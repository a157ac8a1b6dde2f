"""`diptych convert`: a checkpoint in one file becomes a model that the other commands take."""

from __future__ import annotations

import json

from safetensors.torch import save_file

from pipeline.checkpoints import tiny
from tests.cli.shell import Shell, made_with
from tests.pipeline.original_layout import checkpoint

SHAPE = tiny.SHAPES[tiny.TINY]


def test_a_file_becomes_a_model_to_draw_with(shell: Shell) -> None:
    save_file(checkpoint(tiny.make(SHAPE, seed=3)), shell.folder / "mine.safetensors")
    tiny.save(shell.folder / "base", SHAPE)
    predicts = ("--prediction-type", "v_prediction", "--zero-snr")
    told = shell.done("convert", "mine.safetensors", "--base", "base", "-o", "models/mine", *predicts)
    assert told.out == "models/mine\n"
    scheduler = json.loads((shell.folder / "models/mine/scheduler/scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction" and scheduler["rescale_betas_zero_snr"] is True
    shell.done("generate", "x", "--model", "models/mine", "-o", "out", "--steps", "2")
    assert made_with(shell.pictures()[0])["steps"] == 2


def test_what_cannot_be_converted_is_named_and_leaves_nothing(shell: Shell) -> None:
    (shell.folder / "mine.safetensors").write_bytes(b"no")
    tiny.save(shell.folder / "base", SHAPE)
    assert "model: mine.safetensors: is no whole safetensors file" in shell.refusal(
        "convert", "mine.safetensors", "--base", "base", "-o", "models/mine"
    )
    assert "there is no such file" in shell.refusal(
        "convert", "gone.safetensors", "--base", "base", "-o", "models/mine"
    )
    assert not list((shell.folder / "models").iterdir())
    told = shell("generate", "x", "--model", "mine.safetensors", "-o", "out")
    assert (
        told.code == 2 and "is a file; a model is a folder in diffusers' format, which `diptych models add`" in told.err
    )
