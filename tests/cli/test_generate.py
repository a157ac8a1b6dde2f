"""`diptych generate` as its users meet it: what it draws, and what it does when something gives way."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from core import pictures
from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny_zimage import TINY_Z
from pipeline.content import blurred
from pipeline.iterations import IterationBuilder
from pipeline.pixels.picture import Picture
from tests.cli.shell import Shell, made_with
from tests.disks import small_disk
from tests.pipeline import checkers, loras
from tests.unet_opt.shapes import tiny_vae

LONG = "very long words here " * 120

# -- what it draws -------------------------------------------------------------------------------------------------


def test_every_option_reaches_the_picture(shell: Shell) -> None:
    words = "--seed 3 --guidance 2.5 --negative= --scheduler dpm++2m --size 16x16 --guidance-interval 0:0.7"
    path = shell.drawn("x", *words.split(), "--deterministic", "--steps", "3", "--deepcache", "3:resnet")
    assert made_with(path) == {
        "prompt": "x", "seed": 3, "width": 16, "height": 16, "negative_prompt": "", "steps": 3,
        "guidance_scale": 2.5, "scheduler": "dpm++2m", "deterministic": True, "preview_every": 0,
        "deepcache": {"interval": 3, "depth": "resnet", "first": 0, "last": 0, "deep_steps": None},
        "guidance_interval": [0, 0.7],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("--timesteps 999,500,20 --scheduler tcd --eta 0.5", {"timesteps": [999, 500, 20], "steps": 3, "eta": 0.5}),
        ("--sigmas 14.6,3.8,0.9,0 --steps 3", {"sigmas": [14.6, 3.8, 0.9, 0], "steps": 3}),
        ("--schedule-type karras --guided-steps 0,2", {"schedule_type": "karras", "guided_steps": [0, 2]}),
    ],
)
def test_lists_of_steps_reach_the_picture_and_count_its_steps(shell: Shell, words: str, made: dict[str, Any]) -> None:
    shell.done("generate", "x", "-o", "out", "--model", tiny.TINY, *words.split())
    (path,) = shell.pictures()
    assert made_with(path).items() >= made.items() and "guidance_interval" not in made_with(path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--timesteps 9,x", "--timesteps: must be numbers such as 999,749,499,249, not '9,x'"),
        ("--timesteps 9,10", "--timesteps.1: must be less than the one before"),
        ("--sigmas 1:2", "--sigmas: must be numbers"),
        ("--sigmas 9,1 --scheduler lcm", "--sigmas: is not supported by lcm"),
        ("--guided-steps 0:2", "--guided-steps: must be numbers such as 0,2,4, not '0:2'"),
        ("--guided-steps 0 --guidance-interval 0:1", "--guided-steps: cannot be given together with"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_its_option(shell: Shell, options: str, told: str) -> None:
    assert told in shell.refused("x", *options.split())


def test_a_tiny_decoder_is_used_if_asked_for(shell: Shell) -> None:
    tiny_vae(8).save_pretrained(shell.folder / "taesd")
    drawn = {}
    for decoder in ("full", "tiny"):
        path = shell.drawn("x", "--tiny-vae", "taesd", "--seed", "1", "--vae", decoder)
        assert made_with(path).get("vae", "full") == decoder
        drawn[decoder] = pictures.read(path).tobytes()
    assert drawn["full"] != drawn["tiny"]
    (shell.folder / "out").rename("drawn")
    assert "--vae: this model has no tiny decoder; it has full" in shell.refused("x", "--vae", "tiny")
    assert "no such folder" in shell.refused("x", "--tiny-vae", "gone")


def test_a_count_draws_a_prompt_with_seeds_counting_up(shell: Shell) -> None:
    assert shell.generate("a fox", "-n", "3", "--seed", str(2**63 - 2)).code == 0
    seeds = {f"a-fox-{seed}.png": seed for seed in (2**63 - 2, 2**63 - 1, 0)}
    assert {path.name: made_with(path)["seed"] for path in shell.pictures()} == seeds


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
    assert said.code == 0
    assert re.fullmatch(r"64 pictures in out in \d+\.\d s, \d+(\.\d+)? a second\n", said.out), said.out
    made = {path.name.partition("-a-cat")[0]: made_with(path)["prompt"] for path in shell.pictures()}
    assert made == dict(rows[:64])


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
    prompt = "cat " * 130 + "[/red] [bold]:smile: \\[x] " + "tail " * 400
    said = shell.generate(prompt, "a fox", "--seed", "1", "--model", TINY_Z)
    assert said.code == 0
    (line,) = [line for line in said.err.splitlines() if "left out" in line]
    assert line.startswith("cat-") and "prompt: only the first 512 tokens were read" in line
    assert "[/red] [bold]:smile:" in line and len(line) < 450
    assert len(shell.pictures()) == 2


def test_a_path_that_is_no_text_is_still_said(shell: Shell) -> None:
    folder = os.fsdecode(b"\xff")
    said = shell.generate("a fox", "--seed", "1", "-o", folder)
    assert said.code == 0 and said.out == "\\udcff/a-fox-1.png\n"


# -- when something gives way --------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_midway_stops_with_what_was_written(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write, calls = resource.getrlimit(resource.RLIMIT_FSIZE), Picture.write, []

    def filling(picture: Picture, path: Path, *marks: Any) -> None:
        calls.append(path)
        if len(calls) == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        write(picture, path, *marks)

    monkeypatch.setattr(Picture, "write", filling)
    try:
        said = shell.generate("a fox", "-n", "20")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.code == 2 and said.out == ""
    last = said.err.strip().splitlines()[-1]
    assert last == f"diptych: --out: out cannot be written ({os.strerror(errno.EFBIG)}); 3 of 20 pictures were written"
    assert len(shell.pictures()) == 3


def test_a_full_disk_is_found_before_anything_is_drawn(shell: Shell, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "24k") as disk:
        with pytest.raises(OSError):
            (disk / "filler").write_bytes(bytes(64 * 1024))
        assert "(No space left on device)" in shell.refused("a fox", "-o", str(disk))


def test_a_picture_that_fails_is_named_and_the_others_are_drawn(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = IterationBuilder.decode_latents

    def failing(builder: Any, group: Any, requests: Sequence[Any]) -> Any:
        if any(request.parameters.seed == 1 for request in requests):
            raise RuntimeError("[/no] markup")
        return decode(builder, group, list(requests))

    monkeypatch.setattr(IterationBuilder, "decode_latents", failing)
    said = shell.generate("a hen", "a fox", "-n", "2", "--seed", "0")
    assert said.code == 1 and said.out.startswith("2 pictures in out")
    for number, name in enumerate(("hen", "fox"), 1):
        assert f"a-{name}-1.png: PROMPT {number}: RuntimeError: [/no] markup" in said.err
    assert len(shell.pictures()) == 2


def test_a_picture_that_the_checker_flags_is_not_written_or_blurred_or_told(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkers.classifier(shell.folder / "checker")
    monkeypatch.setenv("DIPTYCH_CHECKER", str(shell.folder / "checker"))
    drawn: dict[str, Any] = {}
    for action in ("off", "tag", "blur", "refuse"):
        monkeypatch.setenv("DIPTYCH_CHECKER_ACTION", action)
        monkeypatch.setenv("DIPTYCH_CHECKER_LABELS", "nsfw:0,normal:0")  # so that every picture is flagged
        result = shell.generate("a fox", "--seed", "1")
        assert result.code == (action == "refuse"), result.err
        paths = shell.pictures() if (shell.folder / "out").exists() else []
        drawn[action] = [np.asarray(pictures.read(path)) for path in paths]
        for path in paths:
            path.unlink()
        words = {"tag": "the checker flags the picture: nsfw", "blur": "is blurred", "refuse": "was refused by the"}
        assert words.get(action, "") in result.err
    assert drawn["refuse"] == [] and (drawn["off"][0] == drawn["tag"][0]).all()
    assert (drawn["blur"][0] == np.asarray(blurred(Image.fromarray(drawn["off"][0])))).all()
    monkeypatch.delenv("DIPTYCH_CHECKER")
    assert "checker_action: there is no checker" in shell.refused("x")


@pytest.mark.quick(0, 3)
@pytest.mark.parametrize(
    ("place", "refused", "options"),
    [
        (0, LONG, ()),
        (1, f"({LONG}:1.2) fox", ("--syntax", "a1111")),
        (2, "a torn picture", ("--embeddings-dir", "embeddings")),
        (1, "a pickled picture", ("--embeddings-dir", "embeddings")),
    ],
    ids=["too long", "weights", "a damaged embedding", "an embedding in a pickle"],
)
def test_a_row_that_the_model_refuses_is_named_and_the_others_are_drawn(
    shell: Shell, place: int, refused: str, options: tuple[str, ...]
) -> None:
    (shell.folder / "embeddings").mkdir()
    for name in ("torn.safetensors", "pickled.pt"):
        (shell.folder / "embeddings" / name).write_bytes(b"torn")
    prompts = ["a red heart", "a blue heart"]
    prompts.insert(place, refused)
    said = shell.generate("--prompts", shell.save("three.txt", "\n".join(prompts)), *options)
    assert said.code == 1 and said.out.startswith("2 pictures in out"), said
    assert f".png: row {place + 1}: Invalid: prompt: " in said.err
    assert len(shell.pictures()) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "PROMPT: has 2040 tokens"),
        (["a red heart", "--scheduler", "lcm", "--steps", "51"], "steps=51"),
        (["a red heart", "--lora", "none"], "no LoRA folder is configured"),
    ],
)
def test_a_prompt_that_the_model_refuses_hides_no_bad_option(shell: Shell, options: list[str], message: str) -> None:
    assert message in shell.refused(LONG, *options)


def test_loras_are_named_as_their_files_are(shell: Shell) -> None:
    name = "[SDXL] 线稿 & Wash (v2).1"
    (shell.folder / "loras").mkdir()
    loras.write(load(tiny.TINY), shell.folder / "loras", name)
    path = shell.drawn("a fox", "--seed", "1", "--lora", f"{name}:0.5", "--lora-dir", "loras")
    assert made_with(path)["lora"] == f"{name}:0.5"
    with Image.open(path) as image:
        assert f"a fox <lora:{name}:0.5>" in image.text["parameters"]  # type: ignore[attr-defined]
