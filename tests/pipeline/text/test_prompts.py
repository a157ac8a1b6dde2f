"""Prompt files: every format as people write it, and every way in which one can be wrong, by row."""

from __future__ import annotations

import csv
import io
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.text import prompts
from pipeline.text.prompts import PromptRow, PromptsError, read


def save(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("p.txt", "a fox\n\n  a hen  \n", [("a fox", 1, "00001"), ("a hen", 3, "00003")]),
        ("p.txt", "a fox\r\na hen\r\n", [("a fox", 1, "00001"), ("a hen", 2, "00002")]),
        ("p.txt", "a fox\ra hen", [("a fox", 1, "00001"), ("a hen", 2, "00002")]),
        ("p.txt", "\ufeffa fox", [("a fox", 1, "00001")]),
        ("p", 'tab\tand, comma "quote"', [('tab\tand, comma "quote"', 1, "00001")]),
        ("p.tsv", "id\tcaption\n7\ta fox\n", [("a fox", 2, "7")]),
        ("p.tsv", "caption\na fox\n", [("a fox", 2, "00002")]),
        ("p.TSV", "ID\tCaption\n7\ta fox\n", [("a fox", 2, "7")]),
        ("p.tsv", 'id\tcaption\n1\tsays "hi" and "\n2\t b"\n', [('says "hi" and "', 2, "1"), ('b"', 3, "2")]),
        ("p.tsv", 'id\tcaption\n1\t"A sign, ""1802""."\n2\t"tab\tor\r\nend"\n3\tc', [
            ('A sign, "1802".', 2, "1"), ("tab\tor\nend", 3, "2"), ("c", 5, "3")]),
        ("p.csv", 'file_name,text\na.png,a fox\n', [("a fox", 2, "00002")]),
        ("p.csv", 'prompt\n"a" fox\n', [("a fox", 2, "00002")]),
        ("p.tsv", "\ufeffprompt\tid\r\na fox\t7\r\n\r\na hen\t8\r\n", [("a fox", 2, "7"), ("a hen", 4, "8")]),
        ("p.csv", 'id,prompt\n1,"a, b"\n2,"c\nd"\n3,e\n', [("a, b", 2, "1"), ("c\nd", 3, "2"), ("e", 5, "3")]),
        ("p.csv", "\nprompt\n\n🦊\n", [("🦊", 4, "00004")]),
        ("p.csv", "caption,prompt\nno,yes\n", [("yes", 2, "00002")]),
        ("p.jsonl", '{"prompt": "a fox", "id": 7}\n\n"a hen"\n{"text": "b"}', [
            ("a fox", 1, "7"), ("a hen", 3, "00003"), ("b", 4, "00004")]),
        ("p.json", '["a fox", {"caption": " b\\n", "id": "x"}]', [("a fox", 1, "00001"), ("b", 2, "x")]),
        ("p.JSON", '{"images": [{"id": 9}], "annotations": [{"image_id": 9, "id": 3, "caption": "A dog."}]}', [
            ("A dog.", 1, "3")]),
    ],
)  # fmt: skip
def test_what_people_write_is_read(tmp_path: Path, name: str, data: str, expected: list[tuple[str, int, str]]) -> None:
    assert read(save(tmp_path, name, data)) == [PromptRow(*one) for one in expected]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("p.txt", "", "holds no prompts"),
        ("p.txt", " \n\t\n", "holds no prompts"),
        ("p.txt", b"a fox\na \xff", r"row 2 is not UTF-8 \(byte 8 of the file\)"),
        ("p.txt", "a fox".encode("utf-16"), "is UTF-16, as its first two bytes say; save it as UTF-8"),
        ("p.tsv", "id\tcaption\n1\ta\n".encode("utf-16-be"), "is UTF-16"),
        ("p.tsv", "", "is empty"),
        ("p.csv", "\n\n", "is empty"),
        ("p.tsv", "id\tcaption\n", "holds no prompts"),
        ("p.tsv", "id\tword\n1\ta\n", "row 1 names no column prompt or caption or text; it has 'id, word'"),
        ("p.csv", "\x1b[31m,\x00\n", r"it has '\\x1b\[31m, \\x00'"),
        ("p.tsv", "id\tcaption\n1\ta\n2\n", "row 3 has 1 columns, the header has 2"),
        ("p.tsv", "id\tcaption\n1\ta\tb\n", "row 2 has 3 columns, the header has 2"),
        ("p.tsv", "id\tcaption\n1\ta\n2\t \n", "row 3 has an empty caption"),
        ("p.tsv", "id\tprompt\n\ta\n", "row 2 has an empty id"),
        ("p.tsv", "id\tcaption\n1\ta\n2\tb\n1\tc\n", "row 4 has the id '1' of row 2"),
        (
            "p.csv",
            'prompt\nfine\n"never closed\nfoo\n',
            "row 3 has a cell that begins with a quote, which",
        ),
        ("p.tsv", 'id\tcaption\n1\ta\n2\t"b\n3\tc', "row 3 has a cell that begins with a quote, which"),
        ("p.json", "[1", "p.json: is not JSON"),
        (
            "p.json",
            '{"images": [], "annotations": {}}',
            "holds neither a list nor an object with a list of `annotations`",
        ),
        ("p.json", "[" * 100_000, "is not JSON"),
        ("p.json", "[]", "holds no prompts"),
        ("p.jsonl", '"a"\n{"prompt": \n', "row 2 is not JSON"),
        ("p.jsonl", '"a"\n["b"]\n', "row 2 is neither a text nor an object"),
        ("p.jsonl", '{"id": 1}\n', "row 1 names no column prompt or caption or text; it has 'id'"),
        ("p.jsonl", '{"prompt": 1}\n', "row 1: prompt is not a text"),
        ("p.jsonl", '{"prompt": "a", "id": true}\n', "row 1: id is neither a text nor a whole number"),
        ("p.jsonl", '{"prompt": "a", "id": 1}\n{"prompt": "a", "id": "1"}\n', "row 2 has the id '1' of row 1"),
    ],
)
def test_what_is_wrong_is_refused_by_file_and_row(tmp_path: Path, name: str, data: str | bytes, message: str) -> None:
    path = save(tmp_path, name, data)
    with pytest.raises(PromptsError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ") and "\x1b" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"missing.txt: cannot be read \(No such file"):
        read(tmp_path / "missing.txt")
    with pytest.raises(PromptsError, match=r"cannot be read \(Is a directory"):
        read(tmp_path)
    with pytest.raises(PromptsError, match=r"cannot be read \(File name too long"):
        read(tmp_path / ("x" * 5000))


def test_a_file_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_FILE_BYTES", 2**20)
    with pytest.raises(PromptsError, match="/dev/zero: is larger than 1 MiB"):
        read(Path("/dev/zero"))


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("a fox\na hen\n"))
    writer.start()
    assert [prompt.text for prompt in read(pipe)] == ["a fox", "a hen"]
    writer.join()


@pytest.mark.parametrize("name", ["p.tsv", "p.csv"])
def test_a_long_caption_in_a_table_is_read_whole(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, name, f"caption\n{'x' * 200_000}\n")
    assert len(read(path)[0].text) == 200_000  # what is too long for a prompt, `contract.image.check` says


@pytest.mark.parametrize("name", ["p.txt", "p.tsv"])
def test_a_limit_reads_no_further(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, name, "caption\na\nb\nc\td\te\n")
    assert [prompt.text for prompt in read(path, 2)][-1] in ("a", "b")
    assert len(read(path, 2)) == 2
    assert len(read(save(tmp_path, "two.txt", "a\nb\n"), 5)) == 2


TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp", "Zs"]), min_size=1, max_size=20)


@given(st.lists(TEXT.filter(lambda text: text.strip()), min_size=1, max_size=8))
def test_any_prompts_survive_any_format(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    records = [{"id": str(i), "prompt": text} for i, text in enumerate(texts)]
    files = {
        "p.json": json.dumps(records),
        "p.jsonl": "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records),
    }
    for name, delimiter in (("p.csv", ","), ("p.tsv", "\t")):
        stream = io.StringIO()
        csv.writer(stream, delimiter=delimiter).writerows([["id", "prompt"], *(record.values() for record in records)])
        files[name] = stream.getvalue()
    for name, data in files.items():
        rows = read(save(folder, name, data))
        assert [row.text for row in rows] == [text.strip() for text in texts]
        assert [row.name for row in rows] == [str(i) for i in range(len(texts))]
    if not texts[0].startswith("\ufeff"):
        rows = read(save(folder, "p.txt", "\n".join(texts)))
        assert [row.text for row in rows] == [text.strip() for text in texts]


CELLS = st.text(st.sampled_from(['"', '"', "a", " ", ",", "\t", "\n", "'", "\\"]), max_size=30)


@given(CELLS, st.sampled_from(["\t", ","]))
def test_a_table_has_the_cells_that_csv_reads(
    tmp_path_factory: pytest.TempPathFactory, cells: str, delimiter: str
) -> None:
    """The refused ones are those that make no prompts, and a quote that nothing closes: it takes in the last row."""
    text = f"prompt{delimiter}id\n{cells}{delimiter}1\nlast{delimiter}2\n"
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    _, *rows = [[cell.strip() for cell in row] for row in reader if any(cell.strip() for cell in row)]
    path = save(tmp_path_factory.mktemp("prompts"), "p.tsv" if delimiter == "\t" else "p.csv", text)
    try:
        assert [[row.text, row.name] for row in read(path)] == rows
        assert rows[-1] == ["last", "2"]
    except PromptsError as error:
        right = all(len(row) == 2 and all(row) for row in rows) and len({row[-1] for row in rows}) == len(rows)
        assert not right or rows[-1] != ["last", "2"], error


@given(st.binary(max_size=200), st.sampled_from([".txt", ".tsv", ".csv", ".json", ".jsonl"]))
def test_any_bytes_are_prompts_or_a_clear_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
) -> None:
    path = save(tmp_path_factory.mktemp("prompts"), f"p{suffix}", data)
    try:
        assert all(prompt.text.strip() and prompt.name for prompt in read(path))
    except PromptsError as error:
        assert str(error).startswith(f"{path}: ")
