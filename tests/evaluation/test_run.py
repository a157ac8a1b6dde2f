"""A run's folder, whatever is left of it: torn lines, lost and changed pictures, other settings, two processes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from evaluation.captions import Caption
from evaluation.run import EvaluationRun, RunError, RunWriter

CAPTIONS = [Caption(k, f"id{k}", f"a caption of {k}") for k in range(5)]
SETTINGS = {"model": "m", "steps": 20, "seed_offset": 7}


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (number, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def add(writer: RunWriter, captions: Iterable[Caption], session: int = 0) -> None:
    for caption in captions:
        k = caption.index
        writer.add(caption, 7 + k, f"{k:05d}.png", png(k), session=session, seconds=1.0)


def filled(folder: Path, count: int = 5) -> Path:
    with RunWriter(folder, SETTINGS, CAPTIONS) as writer:
        add(writer, CAPTIONS[:count])
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    run = EvaluationRun.read(filled(tmp_path / "r"))
    assert run.name == "r" and not run.missing and run.captions == CAPTIONS
    assert [path.read_bytes() for path in run.files()] == [png(k) for k in range(5)]
    assert [run.records[k].seed for k in range(5)] == [7, 8, 9, 10, 11] and run.sessions == 1


@given(cut=st.integers(0, 400))
def test_a_torn_log_costs_no_more_than_its_last_line(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = filled(tmp_path_factory.mktemp("runs") / "r")
    log = folder / "pictures.jsonl"
    whole = log.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    log.write_bytes(kept)
    left = kept.count(b"\n")
    with RunWriter(folder, SETTINGS, CAPTIONS) as writer:
        assert sorted(writer.run.records) == list(range(left))
        add(writer, writer.run.missing, session=1)
    assert [path.read_bytes() for path in EvaluationRun.read(folder).files()] == [png(k) for k in range(5)]
    assert len(log.read_bytes().splitlines()) == 5


@pytest.mark.parametrize("data", [None, png(99)])
def test_a_picture_that_is_not_what_was_recorded_is_drawn_again(data: bytes | None, tmp_path: Path) -> None:
    """And half a picture is taken away."""
    folder = filled(tmp_path / "r")
    path, part = (folder / "pictures" / name for name in ("00002.png", ".0123456789abcdef.part"))
    part.write_bytes(b"half")
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(RunError, match="1 of 5 pictures are not drawn"):
        EvaluationRun.read(folder)
    with RunWriter(folder, SETTINGS, CAPTIONS) as writer:
        assert [caption.index for caption in writer.run.missing] == [2] and not part.exists()


@pytest.mark.parametrize(
    ("settings", "captions", "said"),
    [
        (SETTINGS | {"steps": 30}, CAPTIONS, "steps is 20 there, 30 here"),
        (SETTINGS | {"precision": "int8"}, CAPTIONS, "precision is None there, 'int8' here"),
        (SETTINGS, CAPTIONS[:3], "captions is 5 there, 3 here"),
        (SETTINGS, [*CAPTIONS[:4], Caption(4, "id4", "another")], "captions_sha256 is"),
    ],
)
def test_other_settings_are_refused_by_name(
    settings: dict[str, object], captions: list[Caption], said: str, tmp_path: Path
) -> None:
    folder = filled(tmp_path / "r")
    with pytest.raises(RunError) as refused:
        RunWriter(folder, settings, captions)
    assert said in str(refused.value) and str(folder) in str(refused.value)
    with RunWriter(folder, SETTINGS, CAPTIONS) as writer:  # and it is not left locked
        assert not writer.run.missing


def test_settings_may_change_as_long_as_nothing_is_drawn(tmp_path: Path) -> None:
    """By one process at a time."""
    RunWriter(tmp_path / "r", SETTINGS | {"model": "misspelt"}, CAPTIONS).close()
    with RunWriter(tmp_path / "r", SETTINGS, CAPTIONS[:2]) as writer:
        assert writer.run.settings["model"] == "m" and len(writer.run.missing) == 2
        with pytest.raises(RunError, match="another process"):
            RunWriter(tmp_path / "r", SETTINGS, CAPTIONS[:2])


def test_another_model_is_refused_and_other_threads_are_told(tmp_path: Path) -> None:
    printed = {"model": "m", "weights": "w", "precision": "fp32", "device": "cpu 2 threads"}
    with RunWriter(tmp_path / "r", SETTINGS, CAPTIONS) as writer:
        assert writer.check_fingerprint(printed) == []
        assert writer.check_fingerprint(printed | {"device": "cpu 4 threads"}) == [
            "pictures differ in device: 'cpu 2 threads' and 'cpu 4 threads'"
        ]
        with pytest.raises(RunError, match="weights is 'w' there, 'v' here"):
            writer.check_fingerprint(printed | {"weights": "v"})
        writer.add(CAPTIONS[0], 7, "0.png", png(0), session=0, seconds=0.0)
    with RunWriter(tmp_path / "r", SETTINGS, CAPTIONS) as writer, pytest.raises(RunError, match="precision"):
        writer.check_fingerprint(printed | {"precision": "int8"})


def test_pictures_of_an_older_version_may_be_joined_and_what_they_do_not_tell_is_told(tmp_path: Path) -> None:
    older = {"model": "m", "weights": "w", "precision": "fp32", "device": "cpu", "torch": "2.12"}
    newer = older | {"torch": "2.13", "version": "0.2.0", "code": "c", "kernels": "avx2 d", "compiler": "g++ 12"}
    with RunWriter(tmp_path / "r", SETTINGS, CAPTIONS) as writer:
        assert writer.check_fingerprint(older) == []
        assert writer.check_fingerprint(newer) == [
            "pictures differ in torch: '2.12' and '2.13'",
            "an older version drew some pictures, whose fingerprints do not hold code, compiler, kernels, version",
        ]
    with RunWriter(tmp_path / "s", SETTINGS, CAPTIONS) as writer:
        assert writer.check_fingerprint(newer) == []
        assert writer.check_fingerprint(newer | {"code": "e"}) == ["pictures differ in code: 'c' and 'e'"]
        left = {name: value for name, value in newer.items() if name != "compiler"}
        assert writer.check_fingerprint(left) == ["pictures differ in compiler: 'g++ 12' and None"], (
            "not every one has each field"
        )
        with pytest.raises(RunError, match="weights"):
            writer.check_fingerprint(older | {"weights": "v"})


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("line", "pictures.jsonl line 2 is no record"),
        ("other", "pictures.jsonl line 2 is for 'id4', not 'id1'"),
        ("head", "damaged"),
        ("captions", "captions.json is not what run.json was written with"),
        ("version", "has version 99"),
    ],
)
def test_damage_is_named_by_file_and_line(harm: str, said: str, tmp_path: Path) -> None:
    folder = filled(tmp_path / "r")
    log, head = folder / "pictures.jsonl", folder / "run.json"
    lines = log.read_text("utf-8").splitlines()
    if harm in ("line", "other"):
        lines[1] = "{" if harm == "line" else lines[1].replace('"id1"', '"id4"')
        log.write_text("\n".join(lines) + "\n")
    elif harm == "captions":
        (folder / "captions.json").write_text(json.dumps([["id0", "x"]]))
    else:
        head.write_text("{" if harm == "head" else head.read_text().replace('"version": 1', '"version": 99'))
    with pytest.raises(RunError) as refused:
        EvaluationRun.read(folder)
    assert said in str(refused.value) and str(folder) in str(refused.value)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(RunError, match="contains something other than a run"):
        RunWriter(tmp_path, SETTINGS, CAPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]
    with pytest.raises(RunError, match="is no run"):
        EvaluationRun.read(tmp_path)


def test_a_full_disk_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write
    with RunWriter(tmp_path / "r", SETTINGS, CAPTIONS) as writer, monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: written(fd, data[:10]))
        with pytest.raises(OSError, match="half a line"):
            writer.add(CAPTIONS[0], 7, "0.png", png(0), session=0, seconds=0.0)
    with RunWriter(tmp_path / "r", SETTINGS, CAPTIONS) as writer:
        assert len(writer.run.missing) == 5


def test_speed_is_counted_while_the_engine_is_full(tmp_path: Path) -> None:
    captions = [Caption(k, str(k), "x") for k in range(40)]
    with RunWriter(tmp_path / "r", SETTINGS, captions) as writer:
        for caption in captions:  # the first comes late, then two a second
            seconds = 100 + caption.index / 2
            writer.add(caption, 0, f"{caption.index}.png", png(0), session=0, seconds=seconds)
            if caption.index == 10:
                assert writer.run.speed() is None
        assert writer.run.speed() == pytest.approx(2.0)
