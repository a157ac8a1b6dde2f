"""What commands refuse: the message names what is wrong, and nothing is left behind."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli.arguments import FOLDERS
from core.config import Settings
from deployment.redis import free_port
from tests.cli.shell import Shell


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "PROMPT: give at least one"),
        ("' \n'", "PROMPT: must not be empty"),
        ("fine a\0b", "PROMPT 2: character 2 is U+0000"),
        (os.fsdecode(b"\xff"), "PROMPT: character 1 is U+DCFF, a control character or surrogate"),
        ("x --negative \x1b[31m", "--negative: character 1 is U+001B"),
        ("fine (a).blend(1) --weighting", "PROMPT 2: .blend() is not offered"),
        ("x --weighting --negative (a)99", "--negative: a weight is more than 10"),
        ("x --size 33x32", "--size: 33x32 is not offered; offered: 32x32"),
        ("x --size big", "--size: must look like 1024x1024, not 'big'"),
        ("x --size 100x100000", "--size: must look like 1024x1024, with at most five digits a side, not '100x100000'"),
        ("x --steps 10000", "--steps: must be between 1 and 1000, not 10000"),
        ("x --steps many", "--steps: invalid int value: 'many'"),
        ("x --guidance nan", "--guidance: must be a finite number"),
        (f"x --seed {'9' * 400}", "--seed: must be between 0 and"),
        ("x --scheduler unipc", "--scheduler: must be one of euler, euler-ancestral, dpm++2m,"),
        ("x --scheduler lcm --steps 51", "steps=51"),
        ("x -n 0", "--count: must be between 1 and 10000, not 0"),
        ("x --limit 5", "--limit: counts prompts of a file"),
        ("--prompts p --limit 0", "--limit: must be at least 1, not 0"),
        ("x --threads -1", "--threads: input should be greater than or equal to 0"),
        ("x --precision int3", "--precision"),
        ("x --unknown", "diptych generate: error: unrecognized arguments: --unknown"),
        ("x --guidence 3", "did you mean --guidance?"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_arguments_that_cannot_be_used_are_named(shell: Shell, arguments: str, message: str) -> None:
    assert message in shell.refused(*shlex.split(arguments))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("missing.txt", None, "missing.txt: cannot be read (No such file or directory)"),
        ("p.txt", b"fine\n\xff", "p.txt: row 2 is not UTF-8"),
        ("p.txt", "", "p.txt: holds no prompts"),
        ("p.txt", "fine\n\nbell\a\n", "p.txt: row 3: character 5 is U+0007"),
        ("p.tsv", "", "p.tsv: is empty"),
        ("p.tsv", "id\tword\n", "p.tsv: row 1 names no column prompt or caption"),
        ("p.tsv", "id\tcaption\n1\n", "p.tsv: row 2 has 1 columns"),
        ("p.tsv", "id\tcaption\n1\ta\n1\tb\n", "p.tsv: row 3 has the id '1' of row 2"),
        ("p.csv", "id,caption\n1,\n", "p.csv: row 2 has an empty caption"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_prompt_files_that_cannot_be_used_are_named(
    shell: Shell, name: str, data: str | bytes | None, message: str
) -> None:
    if data is not None:
        shell.save(name, data)
    said = shell.refused("fine", "--prompts", name)
    assert said.startswith("diptych: --prompts: ") and message in said


def cut_short(model: Path) -> None:
    file = model / "unet/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "my-model/unet/diffusion_pytorch_model.safetensors: is damaged"),
        (shutil.rmtree, "my-model: no such folder"),
    ],
)
def test_a_model_that_cannot_be_used_is_named(shell: Shell, saved: Path, damage: Any, message: str) -> None:
    model = shutil.copytree(saved, shell.folder / "my-model")
    damage(model)
    assert f"diptych: model: {message}" in shell.refused("x", "--model", "my-model", "-o", "new/folder")


def test_a_folder_that_cannot_be_written_is_named(shell: Shell) -> None:
    shell.save("file", "in the way")
    for out, reason in (("file", "exists"), ("file/below", "directory"), ("/proc/x", ""), ("y" * 300, "too long")):
        said = shell.refused("x", "-o", out)
        assert said.startswith(f"diptych: --out: {out} cannot be written (") and reason in said


def test_a_folder_that_was_there_stays_and_one_that_was_made_for_nothing_goes(shell: Shell) -> None:
    (shell.folder / "out").mkdir()
    shell.refused("x", "--model", "nowhere")
    assert (shell.folder / "out").is_dir()
    shell.refused("x", "--model", "nowhere", "-o", "out/deep/er")
    assert list((shell.folder / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DIPTYCH_PRECISION", "int3", "'fp32', 'bf16', 'fp16', 'int8', 'fp8', 'int8-dynamic', 'int8-sparse' or 'nf4'"),
        ("DIPTYCH_THREADS", "many", "valid integer"),
        ("DIPTYCH_COMPILE", "maybe", "valid boolean"),
        ("DIPTYCH_STARVATION_S", "nan", "finite"),
        ("DIPTYCH_CACHE_DIR", "~nobody-of-this-name/x", "home folder"),
        ("diptych_max_requests", "0", "greater than or equal to 1"),
    ],
)
def test_variables_that_cannot_be_used_are_named(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    said = shell.refused("x")
    assert said.startswith(f"diptych: {name.upper()}: ") and message in said


def test_all_wrong_variables_are_named_at_once(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_PRECISION", "int3")
    monkeypatch.setenv("DIPTYCH_MAX_ROWS", "none")
    said = shell.refused("x")
    assert "DIPTYCH_PRECISION: " in said and "DIPTYCH_MAX_ROWS: " in said


def test_a_misspelt_variable_is_spoken_of(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DIPTYCH_PRECISON", "fp16")
    monkeypatch.setenv("DIPTYCH_TORCH_INDEX", "of the installer")
    monkeypatch.setenv("DIPTYCH_COMMIT", "of a benchmark")
    assert shell.generate("x").code == 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "core.config"]
    assert line == "DIPTYCH_PRECISON is not a known setting and is ignored; did you mean DIPTYCH_PRECISION?"


def test_options_go_over_the_environment(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_MODEL", "/nowhere")
    assert "diptych: model: /nowhere: no such folder" in shell("generate", "x").err
    assert shell.generate("x").code == 0


def test_a_service_takes_the_folders_that_requests_name_from(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployment import serve

    served: list[Settings] = []
    monkeypatch.setattr(serve, "serve", lambda settings, **_: served.append(settings))
    words = [word for name in FOLDERS for word in (f"--{name.replace('_', '-')}", f"/weights/{name}")]
    shell.done("serve", *words)
    assert {name: str(getattr(served[0], name)) for name in FOLDERS} == {name: f"/weights/{name}" for name in FOLDERS}


def test_a_device_that_is_not_there_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_DEVICE", "cuda:99")
    assert "cannot be put on cuda:99" in shell.refused("x")


def test_a_cache_that_cannot_be_made_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", "/proc/nowhere")
    assert shell.refused("x", "--compile").startswith("diptych: DIPTYCH_CACHE_DIR: /proc/nowhere")
    assert shell.generate("x").code == 0  # without --compile there is no cache


@pytest.mark.parametrize("command", ["serve", "api", "worker"])
def test_an_install_without_what_serving_needs_is_told_so(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from cli import serve

    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None if name in ("celery", "redis") else name)
    said = shell(command)
    assert said.code == 2 and said.out == ""
    assert said.err == "diptych: celery, redis: not installed; pip install '.[serve]' brings all that serving needs\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--port 0", "--port: input should be greater than or equal to 1"),
        ("--port http", "--port: invalid int value"),
        ("--data ~nobody-of-this-name/x", "--data-dir: refers to a home folder that does not exist"),
        ("--host no-such-host.invalid", "--host: is no address of this machine"),
        ("--data /proc/nowhere", "--data: /proc/nowhere cannot be used ("),
    ],
)
def test_a_service_that_cannot_be_is_refused_at_once(shell: Shell, arguments: str, message: str) -> None:
    said = shell.refusal("serve", *f"--port {free_port()} {arguments}".split())
    assert message in said.strip().splitlines()[-1]
    assert list(shell.folder.iterdir()) == []
