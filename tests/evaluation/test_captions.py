"""Prompt files as the data has them, and every way in which one can be wrong, by file and row."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation import captions
from evaluation.captions import Caption, PromptsError

COCO = 'id\timage_id\tcaption\theight\n70\t227049\tA city at night.\t640\n277\t288229\tThe "large" clock\t425\n'
EMOJI = "file\temoji\tname\tkeywords\nu1.png\t🍕\tpizza\tcheese|slice\nu2.png\t🦊\tfox\tface\n"


def save(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_the_datas_own_tables(tmp_path: Path) -> None:
    found = captions.read(save(tmp_path, "coco.tsv", COCO))
    assert found == [Caption(0, "70", "A city at night."), Caption(1, "277", 'The "large" clock')]
    assert captions.read(save(tmp_path, "e.tsv", EMOJI)) == [Caption(0, "u1.png", "pizza"), Caption(1, "u2.png", "fox")]
    assert captions.read(save(tmp_path, "e.tsv", EMOJI), 1) == [Caption(0, "u1.png", "pizza")]


def test_its_own_caption_goes_before_a_name(tmp_path: Path) -> None:
    both = "name\tcaption\tid\tfile\nno\tyes\t1\tno\n"
    assert captions.read(save(tmp_path, "b.tsv", both)) == [Caption(0, "1", "yes")]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("id\tword\n1\ta\n", "row 1 names no column caption or prompt or text or name"),
        ("id\tcaption\n1\ta\n1\tb\n", "row 3 has the id '1' of row 2"),
        ("id\tcaption\n1\ta\n2\t  \n", "row 3 has an empty caption"),
        ("id\tcaption\n1\ta\n2\n", "row 3 has 1 columns, the header has 2"),
        (b"id\tcaption\n1\ta\n2\tcaf\xe9\n", "row 3 is not UTF-8"),
        ("id\tcaption\n1\ta\n2\tb\x00c\n", "row 3: character 2 is U+0000"),
        ("id\tcaption\n1\x07\ta\n", "row 2: id: character 2 is U+0007"),
        ("id\tcaption\n1\t" + "a" * 10_001 + "\n", "row 2: has 10001 characters"),
        ("id\tcaption\n", "holds no prompts"),
        ("", "is empty"),
    ],
)
def test_what_is_wrong_is_named(data: str | bytes, said: str, tmp_path: Path) -> None:
    path = save(tmp_path, "p.tsv", data)
    with pytest.raises(PromptsError) as refused:
        captions.read(path)
    assert str(refused.value).startswith(f"{path}: ") and said in str(refused.value)


CELL = st.text(
    st.one_of(st.sampled_from('"," '), st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])), min_size=1
).filter(lambda cell: cell == cell.strip())


@given(st.lists(CELL, min_size=1, max_size=6))
def test_what_is_rendered_is_read_back(tmp_path_factory: pytest.TempPathFactory, cells: list[str]) -> None:
    table = captions.render(("id", "caption"), [(str(index), cell) for index, cell in enumerate(cells)])
    path = save(tmp_path_factory.mktemp("captions"), "c.tsv", table)
    assert captions.read(path) == [Caption(index, str(index), cell) for index, cell in enumerate(cells)]


def test_the_digest_tells_lists_apart() -> None:
    a, b = Caption(0, "1", "x"), Caption(1, "2", "y")
    lists = [[a, b], [b, a], [a], [Caption(0, "1x", ""), b], [Caption(0, "1", "xy")]]
    assert len({*map(captions.digest, lists)}) == len(lists)
