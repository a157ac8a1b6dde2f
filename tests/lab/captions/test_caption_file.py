"""A prompts file in the making, whatever is left of it: torn lines, other settings, files that are not ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation import captions
from lab.captions import caption_file
from lab.captions.caption_file import CaptionFile, CaptionFileError, CaptionRow
from tests.evaluation.conftest import read_json

SETTINGS = {"seed": 0, "temperature": 0.7}
BY = {"model": "m", "weights": "w"}
ROWS = [
    CaptionRow(0, "a fox", 11, "", 4),
    CaptionRow(1, None, 12, "", 0, {"duplicate": 3}),
    CaptionRow(2, "drei Füchse", 2**63 - 1, "", 7, {"too long": 1}),
]


def begun(out: Path, rows: list[CaptionRow], settings: dict[str, object] | None = None) -> CaptionFile:
    file = CaptionFile(out, settings or SETTINGS, len(ROWS))
    file.begin(BY)
    for row in rows:
        file.add(row)
    return file


def finished(out: Path) -> bytes:
    with begun(out, ROWS) as file:
        file.finish()
    return out.read_bytes()


def test_what_was_written_is_read_by_evaluate(tmp_path: Path) -> None:
    out = tmp_path / "new" / "c.tsv"
    assert finished(out).decode() == f"id\tcaption\tseed\n00000\ta fox\t11\n00002\tdrei Füchse\t{2**63 - 1}\n"
    assert [(one.id, one.text) for one in captions.read(out)] == [("00000", "a fox"), ("00002", "drei Füchse")]
    told = read_json(tmp_path / "new" / "c.tsv.json")
    assert (told["captions"], told["missing"], told["written_by"]) == (2, [1], BY)
    assert told["settings"] == SETTINGS | {"count": 3} and told["again"] == {"duplicate": 3, "too long": 1}
    assert sorted(path.name for path in out.parent.iterdir()) == ["c.tsv", "c.tsv.json"]
    with CaptionFile(out, SETTINGS, 3) as again:
        assert again.finished and again.rows == ROWS
    with begun(tmp_path / "s.tsv", [replace(row, subject="fox") for row in ROWS]) as file:
        file.finish()
    assert (tmp_path / "s.tsv").read_text().startswith("id\tcaption\tseed\tsubject\n00000\ta fox\t11\tfox\n")


@given(cut=st.integers(0, 500))
def test_a_torn_file_costs_no_more_than_its_last_line(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("captions")
    begun(folder / "c.tsv", ROWS).close()
    part = folder / "c.tsv.part"
    whole = part.read_bytes()
    part.write_bytes(whole[: max(0, len(whole) - cut)])
    left = max(0, part.read_bytes().count(b"\n") - 1)
    with CaptionFile(folder / "c.tsv", SETTINGS, 3) as file:
        assert file.rows == ROWS[:left]
        file.begin(BY)
        for row in ROWS[left:]:
            file.add(row)
    with CaptionFile(folder / "c.tsv", SETTINGS, 3) as file:
        assert file.rows == ROWS, "what was torn is cut off before anything is appended"
        file.begin(BY)
        file.finish()
    assert (folder / "c.tsv").read_bytes() == finished(folder / "whole.tsv")


@pytest.mark.parametrize("killed", ["write_json", "write", ""])
def test_a_kill_while_it_is_finished_costs_nothing(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At either of its writes, or before the rows are taken away: they still are there."""
    out, part, whole = tmp_path / "c.tsv", tmp_path / "c.tsv.part", finished(tmp_path / "whole" / "c.tsv")

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with begun(out, ROWS) as file, monkeypatch.context() as patch:
        rows = part.read_bytes()
        if killed:
            patch.setattr(caption_file, killed, kill)
            with pytest.raises(KeyboardInterrupt):
                file.finish()
        else:
            file.finish()
            part.write_bytes(rows)
    with CaptionFile(out, SETTINGS, 3) as file:
        assert file.finished == (not killed)
        if not file.finished:
            file.begin(BY)
            file.finish()
    assert out.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.tsv", "c.tsv.json", "whole"]


@pytest.mark.parametrize("done", [False, True])
def test_other_settings_are_refused_by_name(done: bool, tmp_path: Path) -> None:
    out = tmp_path / "c.tsv"
    if done:
        finished(out)
    else:
        begun(out, ROWS[:1]).close()
    with pytest.raises(CaptionFileError, match=r"c\.tsv.*other settings.*temperature is 0\.7 there, 1 here"):
        CaptionFile(out, SETTINGS | {"temperature": 1}, 3)
    with pytest.raises(CaptionFileError, match="count is 3 there, 4 here"):
        CaptionFile(out, SETTINGS, 4)
    with CaptionFile(out, SETTINGS, 3) as file:  # and it is not left locked
        assert file.finished == done


def test_another_models_beginning_and_a_second_process_are_refused(tmp_path: Path) -> None:
    begun(tmp_path / "c.tsv", ROWS[:1]).close()
    with CaptionFile(tmp_path / "c.tsv", SETTINGS, 3) as file:
        with pytest.raises(CaptionFileError, match="weights is 'w' there, 'v' here"):
            file.begin(BY | {"weights": "v"})
        with pytest.raises(CaptionFileError, match="written by another process"):
            CaptionFile(tmp_path / "c.tsv", SETTINGS, 3)


def test_what_brought_nothing_is_no_reason_to_refuse(tmp_path: Path) -> None:
    begun(tmp_path / "c.tsv", [CaptionRow(0, None, 1, "", 0, {"empty": 2})]).close()
    with begun(tmp_path / "c.tsv", ROWS, SETTINGS | {"temperature": 1}) as file:
        file.finish()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "c.tsv"
    out.write_bytes(b"mine")
    with pytest.raises(CaptionFileError, match="was not written by this command"):
        CaptionFile(out, SETTINGS, 3)
    assert out.read_bytes() == b"mine" and [path.name for path in tmp_path.iterdir()] == ["c.tsv"]
    out.unlink()
    out.write_bytes(finished(out) + b"00009\tmine\t1\n")
    with pytest.raises(CaptionFileError, match="was changed after it was written"):
        CaptionFile(out, SETTINGS, 3)
    (tmp_path / "c.tsv.json").write_text("{")
    with pytest.raises(CaptionFileError, match=r"c\.tsv\.json is damaged"):
        CaptionFile(out, SETTINGS, 3)


@pytest.mark.parametrize(
    ("line", "text", "said"),
    [
        (0, "{}", "line 1 is no head"),
        (0, None, "has version 99"),
        (1, "{", "line 2 is not row 0"),
        (2, '{"index": 5}', "line 3 is not row 1"),
    ],
)
def test_damage_is_named_by_file_and_line(line: int, text: str | None, said: str, tmp_path: Path) -> None:
    begun(tmp_path / "c.tsv", ROWS[:2]).close()
    part = tmp_path / "c.tsv.part"
    lines = part.read_text("utf-8").splitlines()
    lines[line] = lines[line].replace('"version": 1', '"version": 99') if text is None else text
    part.write_text("\n".join(lines) + "\n", "utf-8")
    with pytest.raises(CaptionFileError) as refused:
        CaptionFile(tmp_path / "c.tsv", SETTINGS, 3)
    assert said in str(refused.value) and str(part) in str(refused.value)
