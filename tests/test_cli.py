"""The command line as its users meet it: what it draws, what it says where, and what it does with all that is wrong.

Most commands run in this process, on the tiny model; a few run as real ones, where imports and signals matter.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

import cli
from pipeline import tiny
from pipeline.picture import Picture

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["--model", tiny.TINY, "--steps", "2"]


class Said(NamedTuple):
    code: int
    out: str
    err: str


class Shell:
    """Runs commands in this process, in a folder of their own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.folder = folder

    def __call__(self, *arguments: str) -> Said:
        self._capsys.readouterr()
        try:
            code = cli.main(arguments)
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        return Said(code, out, err)

    def generate(self, *arguments: str) -> Said:
        return self("generate", *QUICK, "-o", "out", *arguments)

    def refused(self, *arguments: str) -> str:
        """What is said of a command that must be refused, and must leave the folder as it was."""
        before = sorted(self.folder.rglob("*"))
        said = self.generate(*arguments)
        assert said.code == 2, said
        assert said.out == ""
        assert sorted(self.folder.rglob("*")) == before
        line = said.err.strip().splitlines()[-1]
        assert line.startswith("diptych") and len(line) < 1000
        return line

    def pictures(self) -> list[Path]:
        """All that lies in `out`, each of it a whole picture."""
        found = sorted((self.folder / "out").iterdir())
        for path in found:
            with Image.open(path) as image:
                image.load()
        return found

    def save(self, name: str, data: str | bytes) -> str:
        (self.folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return name


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in [name for name in os.environ if name.startswith("DIPTYCH_")]:
        monkeypatch.delenv(name)
    return Shell(capsys, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "whole", tiny.Shape())


def made_with(path: Path) -> dict[str, Any]:
    with Image.open(path) as image:
        found = json.loads(image.text["parameters"])  # type: ignore[attr-defined]
    assert isinstance(found, dict)
    return found


# -- what it draws -------------------------------------------------------------------------------------------------


def test_one_prompt_is_one_picture_and_stdout_is_its_path(shell: Shell) -> None:
    said = shell.generate("a slice of pizza", "--seed", "7")
    assert said.code == 0
    assert said.out == "out/a-slice-of-pizza-7.png\n"
    assert [path.name for path in shell.pictures()] == ["a-slice-of-pizza-7.png"]
    assert made_with(shell.pictures()[0])["prompt"] == "a slice of pizza"


def test_every_option_reaches_the_picture(shell: Shell) -> None:
    options = ["--seed", "3", "--guidance", "2.5", "--negative", "", "--scheduler", "dpm++2m", "--size", "16x16"]
    assert shell.generate("x", *options, "--deterministic", "--steps", "3").code == 0
    (path,) = shell.pictures()
    assert made_with(path) == {
        "prompt": "x", "seed": 3, "width": 16, "height": 16, "negative_prompt": "", "steps": 3,
        "guidance_scale": 2.5, "scheduler": "dpm++2m", "deterministic": True, "preview_every": 0,
    }  # fmt: skip


def test_several_prompts_are_summed_up_in_one_line(shell: Shell) -> None:
    said = shell.generate("a fox", "a hen")
    assert re.fullmatch(r"2 pictures in out in \d+\.\d s, \d+\.\d\d a second\n", said.out)
    assert len(shell.pictures()) == 2


def test_a_count_draws_a_prompt_with_seeds_counting_up(shell: Shell) -> None:
    assert shell.generate("a fox", "-n", "3", "--seed", str(2**63 - 2)).code == 0
    assert {made_with(path)["seed"] for path in shell.pictures()} == {2**63 - 2, 2**63 - 1, 0}
    assert {path.name for path in shell.pictures()} == {f"a-fox-{s}.png" for s in (2**63 - 2, 2**63 - 1, 0)}


def test_equal_prompts_and_equal_names_do_not_overwrite_each_other(shell: Shell) -> None:
    same = ["cat", "cat", "CAT!", "cat-7", "猫", "犬", "picture"]
    assert shell.generate(*same, "--seed", "7", "-n", "2").code == 0
    found = shell.pictures()
    assert len(found) == 14
    assert sorted(made_with(path)["prompt"] for path in found) == sorted(same * 2)
    assert len({path.name.casefold() for path in found}) == 14


def test_sixty_four_prompts_of_a_file_are_sixty_four_pictures(shell: Shell) -> None:
    rows = [(f"{i * 37}", f"A cat number {i // 2} on a mat.") for i in range(70)]  # each caption twice
    table = shell.save("captions.tsv", "id\tcaption\n" + "".join(f"{name}\t{text}\n" for name, text in rows))
    said = shell.generate("--prompts", table, "--limit", "64", "--seed", "5")
    assert said.code == 0 and said.out.startswith("64 pictures in out in ")
    found = shell.pictures()
    assert len(found) == 64
    for name, text in rows[:64]:
        (path,) = [path for path in found if path.name.startswith(f"{name}-a-cat")]
        assert made_with(path)["prompt"] == text


def test_ids_that_are_no_file_names_do_not_collide(shell: Shell) -> None:
    ids = ["a/b", "a_b", "a b", "../up", "x" * 300, "x" * 301, "猫" * 100, "..", "A_B"]
    table = shell.save("p.tsv", "id\tcaption\n" + "".join(f"{name}\tcat\n" for name in ids))
    assert shell.generate("--prompts", table).code == 0
    assert len(shell.pictures()) == len(ids)
    assert {path.name for path in shell.folder.iterdir()} == {"p.tsv", "out"}


def test_prompts_typed_and_in_a_file_are_drawn_together(shell: Shell) -> None:
    file = shell.save("p.txt", "a hen\n\na cow\n")
    assert shell.generate("a fox", "--prompts", file, "--seed", "1").code == 0
    names = [path.name for path in shell.pictures()]
    assert names == ["00001-a-hen-1.png", "00003-a-cow-1.png", "a-fox-1.png"]


def test_a_prompt_that_is_cut_says_so_whatever_is_in_it(shell: Shell) -> None:
    prompt = "cat " * 40 + "[/red] [bold]:smile: \\[x] " + "tail " * 400
    said = shell.generate(prompt, "a fox", "--seed", "1")
    assert said.code == 0
    (line,) = [line for line in said.err.splitlines() if "left out" in line]
    assert line.startswith("cat-") and "prompt: only the first 77 tokens were read" in line
    assert "[/red] [bold]:smile:" in line and len(line) < 450
    assert len(shell.pictures()) == 2


def test_deterministic_commands_give_equal_files(shell: Shell) -> None:
    command = ["a fox", "a hen", "-n", "2", "--seed", "9", "--deterministic"]
    assert shell.generate(*command).code == 0
    first = {path.name: path.read_bytes() for path in shell.pictures()}
    (shell.folder / "out").rename(shell.folder / "before")
    assert shell.generate(*command).code == 0
    assert {path.name: path.read_bytes() for path in shell.pictures()} == first and len(first) == 4


def test_a_saved_model_is_drawn_with_and_nothing_is_said_but_progress(shell: Shell, saved: Path) -> None:
    said = shell("generate", "a fox", "--model", str(saved), "--steps", "2", "--seed", "1")
    assert said.code == 0 and said.out == "out/a-fox-1.png\n"
    assert "torchvision" not in said.err and "arning" not in said.err


def test_a_path_that_is_no_text_is_still_said(shell: Shell) -> None:
    folder = os.fsdecode(b"\xff")
    said = shell.generate("a fox", "--seed", "1", "-o", folder)
    assert said.code == 0 and said.out == "\\udcff/a-fox-1.png\n"


# -- what it refuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROMPT: give at least one"),
        ([""], "PROMPT: must not be empty"),
        ([" \n"], "PROMPT: must not be empty"),
        (["x" * 100_000], "PROMPT: has 100000 characters, at most 10000"),
        (["fine", "a\0b"], "PROMPT 2: character 2 is U+0000"),
        ([os.fsdecode(b"\xff")], "PROMPT: character 1 is U+DCFF, a control character or surrogate"),
        (["x", "--negative", "\x1b[31m"], "--negative: character 1 is U+001B"),
        (["x", "--size", "33x32"], "--size: 33x32 is not offered; offered: 32x32"),
        (["x", "--size", "99999x99999"], "--size: 99999x99999 is not offered"),
        (["x", "--size", "big"], "--size: must look like 1024x1024, not 'big'"),
        (["x", "--size", "32"], "--size: must look like 1024x1024"),
        (["x", "--size", "-32x32"], "--size"),
        (["x", "--steps", "0"], "--steps: must be between 1 and 1000, not 0"),
        (["x", "--steps", "10000"], "--steps: must be between 1 and 1000, not 10000"),
        (["x", "--steps", "many"], "--steps: invalid int value: 'many'"),
        (["x", "--guidance", "nan"], "--guidance: must be a finite number"),
        (["x", "--guidance", "inf"], "--guidance: must be a finite number"),
        (["x", "--guidance", "-1"], "--guidance: must be between 0 and 100, not -1"),
        (["x", "--seed", "-1"], "--seed: must be between 0 and"),
        (["x", "--seed", "9" * 400], "--seed: must be between 0 and"),
        (["x", "--scheduler", "ddim"], "--scheduler: must be one of euler, euler-ancestral, dpm++2m, lcm"),
        (["x", "--scheduler", "lcm", "--steps", "51"], "steps=51"),
        (["x", "-n", "0"], "--count: must be between 1 and 10000, not 0"),
        (["x", "-n", "10001"], "--count: must be between 1 and 10000"),
        (["x", "--limit", "5"], "--limit: counts prompts of a file"),
        (["--prompts", "p", "--limit", "0"], "--limit: must be at least 1, not 0"),
        (["x", "--threads", "-1"], "--threads: input should be greater than or equal to 0"),
        (["x", "--precision", "int3"], "--precision"),
        (["x", "--unknown"], "--unknown"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_arguments_that_cannot_be_used_are_named(shell: Shell, arguments: list[str], message: str) -> None:
    assert message in shell.refused(*arguments)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("missing.txt", None, "missing.txt: cannot be read (No such file or directory)"),
        ("p.txt", b"fine\n\xff", "p.txt: row 2 is not UTF-8"),
        ("p.txt", "", "p.txt: holds no prompts"),
        ("p.txt", f"fine\n{'x' * 100_000}\n", "p.txt: row 2: has 100000 characters"),
        ("p.txt", "fine\n\nbell\a\n", "p.txt: row 3: character 5 is U+0007"),
        ("p.tsv", "", "p.tsv: is empty"),
        ("p.tsv", "id\ttext\n", "p.tsv: row 1 names no column prompt or caption"),
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


def without_vae(model: Path) -> None:
    shutil.rmtree(model / "vae")


def cut_short(model: Path) -> None:
    file = model / "unet/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def of_sd15(model: Path) -> None:
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": "StableDiffusionPipeline"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_vae, "my-model: the part vae is missing"),
        (cut_short, "my-model/unet/diffusion_pytorch_model.safetensors: is damaged"),
        (of_sd15, "my-model/model_index.json: is a StableDiffusionPipeline"),
        (shutil.rmtree, "my-model: no such folder"),
    ],
)
def test_a_model_that_cannot_be_used_is_named(shell: Shell, saved: Path, damage: Any, message: str) -> None:
    model = shutil.copytree(saved, shell.folder / "my-model")
    damage(model)
    assert f"diptych: model: {message}" in shell.refused("x", "--model", "my-model", "-o", "new/folder")


def test_a_model_can_be_wrong_in_the_environment_too(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_MODEL", "/nowhere")
    said = shell("generate", "x")
    assert said.code == 2 and "diptych: model: /nowhere: no such folder" in said.err


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
        ("DIPTYCH_PRECISION", "int8", "'fp32', 'bf16' or 'fp16'"),
        ("DIPTYCH_DEVICE", "gpu", "pattern"),
        ("DIPTYCH_THREADS", "many", "valid integer"),
        ("DIPTYCH_COMPILE", "maybe", "valid boolean"),
        ("DIPTYCH_MAX_ROWS", "1", "greater than or equal to 2"),
        ("DIPTYCH_IMAGE_OBJECTIVE_S", "inf", "finite"),
        ("DIPTYCH_STARVATION_S", "nan", "finite"),
        ("DIPTYCH_STARVATION_S", "0", "greater than 0"),
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
    monkeypatch.setenv("DIPTYCH_PRECISION", "int8")
    monkeypatch.setenv("DIPTYCH_MAX_ROWS", "none")
    said = shell.refused("x")
    assert "DIPTYCH_PRECISION: " in said and "DIPTYCH_MAX_ROWS: " in said


def test_a_misspelt_variable_is_spoken_of(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DIPTYCH_PRECISON", "fp16")
    monkeypatch.setenv("DIPTYCH_TORCH_INDEX", "of the installer")
    assert shell.generate("x").code == 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "core.config"]
    assert line == "DIPTYCH_PRECISON is no setting and is ignored; did you mean DIPTYCH_PRECISION?"


def test_options_go_over_the_environment(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_MODEL", "/nowhere")
    assert shell.generate("x").code == 0


def test_a_device_that_is_not_there_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_DEVICE", "cuda:99")
    assert "cannot be put on cuda:99" in shell.refused("x")


def test_a_cache_that_cannot_be_made_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE_DIR", "/proc/nowhere")
    assert shell.refused("x", "--compile").startswith("diptych: DIPTYCH_CACHE_DIR: /proc/nowhere")
    assert shell.generate("x").code == 0  # without --compile there is no cache


def test_bench_and_serve_refuse_too(shell: Shell, saved: Path) -> None:
    for command in (["bench", "ladder"], ["bench", "arrivals"], ["serve"]):
        said = shell(*command, "--steps", "0")
        assert said.code == 2 and "diptych: --steps: must be between 1 and 1000, not 0" in said.err
    said = shell("serve", "--model", "/nowhere")
    assert said.code == 2 and "diptych: model: /nowhere" in said.err
    assert list(shell.folder.iterdir()) == []


def test_serve_draws_line_by_line_and_survives_bad_ones(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    lines = io.TextIOWrapper(io.BytesIO(b"a fox\n\n\xff\n" + b"x" * 100_000 + b"\na hen\n"))
    monkeypatch.setattr(sys, "stdin", lines)
    said = shell("serve", *QUICK, "--no-compile")
    assert said.code == 0
    assert len(shell.pictures()) == len(said.out.splitlines()) == 2
    assert "prompt: character 1 is U+DCFF" in said.err and "has 100000 characters" in said.err


# -- when something gives way --------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_midway_stops_with_what_was_written(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write, calls = resource.getrlimit(resource.RLIMIT_FSIZE), Picture.write, []

    def filling(picture: Picture, path: Path) -> None:
        calls.append(path)
        if len(calls) == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        write(picture, path)

    monkeypatch.setattr(Picture, "write", filling)
    try:
        said = shell.generate("a fox", "-n", "20")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.code == 2 and said.out == ""
    last = said.err.strip().splitlines()[-1]
    assert last == f"diptych: --out: out cannot be written ({os.strerror(errno.EFBIG)}); 3 of 20 pictures were written"
    assert len(shell.pictures()) == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_real_disk_that_fills_up_holds_whole_pictures_only(shell: Shell, small_disk: Path) -> None:
    said = shell.generate("a fox", "-n", "20", "-o", str(small_disk))
    assert said.code == 2
    found = list(small_disk.iterdir())
    line = f"cannot be written (No space left on device); {len(found)} of 20 pictures were written"
    assert line in said.err and 1 <= len(found) < 20
    for path in found:
        with Image.open(path) as image:
            image.load()
    shell.generate("a hen", "-o", str(small_disk))
    assert not [path for path in small_disk.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_found_before_anything_is_drawn(shell: Shell, small_disk: Path) -> None:
    with pytest.raises(OSError):
        (small_disk / "filler").write_bytes(bytes(64 * 1024))
    assert "(No space left on device)" in shell.refused("a fox", "-o", str(small_disk))


def test_a_picture_that_fails_is_named_and_the_others_are_drawn(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.runner import ImageRunner

    finish = ImageRunner._finish

    def failing(runner: Any, group: Any, requests: Sequence[Any]) -> Any:
        if any(request.parameters.seed == 1 for request in requests):
            raise RuntimeError("[/no] markup")
        return finish(runner, group, list(requests))

    monkeypatch.setattr(ImageRunner, "_finish", failing)
    said = shell.generate("a fox", "-n", "3", "--seed", "0")
    assert said.code == 1 and said.out.startswith("2 pictures in out")
    assert "a-fox-1.png: RuntimeError: [/no] markup" in said.err
    assert len(shell.pictures()) == 2


# -- as a real command ---------------------------------------------------------------------------------------------


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**env, "COLUMNS": "200"}, **options,
    )  # fmt: skip


def test_a_real_command_prints_a_path_and_nothing_that_is_not_for_its_user(tmp_path: Path, saved: Path) -> None:
    process = command(
        "generate", "a slice of pizza", "--model", str(saved), "--steps", "2", "--seed", "1", cwd=tmp_path
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out == "out/a-slice-of-pizza-1.png\n" and (tmp_path / out.strip()).is_file()
    shown = [line for line in err.splitlines() if line.strip()]
    assert all(line.startswith(("steps ", "pictures ")) for line in shown), err


def test_ctrl_c_stops_with_whole_pictures_only(tmp_path: Path) -> None:
    arguments = ["a fox", "-n", "500", "--model", tiny.TINY, "--steps", "60", "--guidance", "1"]
    process = command("generate", *arguments, cwd=tmp_path)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("out/*.png")) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    found = list((tmp_path / "out").iterdir())
    assert found and out == "" and "Traceback" not in err
    assert err.strip().splitlines()[-1] == f"stopped: {len(found)} of 500 pictures were written"
    for path in found:
        with Image.open(path) as image:
            image.load()


@pytest.mark.parametrize("arguments", [["generate", "--help"], ["generate", "x", "--steps", "0"], ["generate"]])
def test_help_and_refusals_do_not_wait_for_torch(arguments: list[str], tmp_path: Path) -> None:
    code = (
        f"import sys, cli\ntry: cli.main({arguments!r})\nfinally: print(*({{'torch', 'diffusers'}} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("words", [[], ["generate"], ["bench", "ladder"], ["bench", "arrivals"], ["serve"]], ids=str)
def test_help_says_something_of_every_option(shell: Shell, words: list[str]) -> None:
    said = shell(*words, "--help")
    assert said.code == 0 and said.err == ""
    lines = said.out.splitlines()
    listed = [i for i, line in enumerate(lines) if re.match(r"  (-|\w)", line) and "diptych" not in line]
    assert listed
    for i in listed:
        below = lines[i + 1] if i + 1 < len(lines) else ""
        assert re.search(r"\S {2,}\S", lines[i].strip()) or below.startswith("    "), lines[i]


def test_help_names_every_scheduler_and_every_exit_code(shell: Shell) -> None:
    from pipeline.sigmas import SCHEDULERS

    said = " ".join(shell("generate", "--help").out.split())
    assert all(name in said for name in SCHEDULERS)
    assert "exit codes: 0 all is drawn; 1 some pictures failed; 2 the input cannot be used" in said
