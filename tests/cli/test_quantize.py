"""`diptych quantize` of a language model: a variant that loads, in either scheme."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm import tiny
from llm.load import load
from tests.cli.shell import Shell


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "small", tiny.SHAPES[tiny.TINY])


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_a_text_model_gets_a_variant_that_loads(shell: Shell, model: Path, scheme: str) -> None:
    (shell.folder / "prompts.txt").write_text("one\ntwo words\nthree whole words\n", "utf-8")
    prompts = str(shell.folder / "prompts.txt")
    said = shell(
        "quantize", "--text-model", str(model), "--scheme", scheme, "--prompts", prompts, "-o", str(model)
    )  # fmt: skip
    assert said.code == 0, said.err
    assert said.out.startswith("text: ") and f" layers in {scheme}, " in said.out
    plain, found = load(str(model)), load(str(model), precision=scheme)
    assert found.precision == scheme and found.digest != plain.digest


def test_scales_alone_are_for_models_that_draw(shell: Shell, model: Path) -> None:
    (shell.folder / "prompts.txt").write_text("one\n", "utf-8")
    prompts = str(shell.folder / "prompts.txt")
    said = shell("quantize", "--text-model", str(model), "--scales-only", "--prompts", prompts, "-o", "out")
    assert said.code == 2 and "--scales-only: " in said.err
