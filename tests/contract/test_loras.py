"""Which LoRAs a text names: read back what was written, whatever else is refused, and no name leads out of a folder."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.loras import MAX_LORAS, MAX_SCALE, LoraReference, is_name, name_error, normal, read

NAME = (
    st.one_of(
        st.text(min_size=1, max_size=40), st.from_regex(r"[A-Za-z0-9_(\[+][\w .()\[\]{}'!&-]{0,40}", fullmatch=True)
    )
    .map(normal)
    .filter(is_name)
)
PUBLISHED = (  # as model sites have them
    "Detail Tweaker XL (v2)",
    "[SDXL] Ink & Wash",
    "add-detail-xl",
    "线稿 Lineart",
    "Café–Noir_v1.5",
    "_hidden gem_",
    "(Style) Ghibli's Offset",
    "sdxl_lightning_8step_lora",
    "50% grey + noise!",
    "{x}~@#$^=;`",
)
SCALE = st.floats(-MAX_SCALE, MAX_SCALE).map(lambda scale: float(f"{scale:.6g}"))


@given(named=st.lists(st.tuples(NAME, SCALE), max_size=MAX_LORAS, unique_by=lambda pair: pair[0]), space=st.booleans())
def test_what_is_written_is_read(named: list[tuple[str, float]], space: bool) -> None:
    text = (" , " if space else ",").join(f"{name}:{scale:.6g}" for name, scale in named)
    assert read(text) == tuple(LoraReference(*pair) for pair in named)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_of_files_as_they_are_published_are_names(name: str) -> None:
    assert is_name(name) and read(f"{name}:0.5, b") == (LoraReference(name, 0.5), LoraReference("b", 1.0))


def test_a_scale_that_is_not_given_is_one() -> None:
    assert read("a, b:0.5,c:-1e1,") == (LoraReference("a", 1.0), LoraReference("b", 0.5), LoraReference("c", -10.0))
    assert read("") == read(" , ") == ()


@given(text=st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = read(text)
    except ValueError as error:
        assert len(str(error)) < 250 and str(error).isprintable()
    else:
        folder = Path("/loras")
        assert all((folder / f"{lora.name}.safetensors").parent == folder for lora in found)
        assert all(is_name(lora.name) and abs(lora.scale) <= MAX_SCALE for lora in found)


@pytest.mark.parametrize("name", ["é", "Café–Noir", "ガ", "각 Ink"])
def test_a_name_in_nfd_is_that_in_nfc(name: str) -> None:
    decomposed = unicodedata.normalize("NFD", name)
    assert decomposed != name and read(f"{decomposed}:2") == (LoraReference(name, 2.0),)
    with pytest.raises(ValueError, match="is named twice"):
        read(f"{decomposed},{name}")


@pytest.mark.parametrize(("character", "most"), [("a", 128), ("é", 121), ("字", 81), ("𝐀", 60)])
def test_a_file_of_any_name_can_be(character: str, most: int, tmp_path: Path) -> None:
    name = character * most
    assert is_name(name)
    (tmp_path / f"{name}.safetensors").touch()
    assert name_error(name + character) is not None


@pytest.mark.parametrize("code", [0xAD, 0x34F, 0x115F, 0x1160, 0x17B4, 0x180B, 0x200B, 0x3164, 0xFE0F, 0xFFA0, 0xE0100])
def test_what_nobody_sees_is_in_no_name(code: int) -> None:
    for name in (chr(code), f"a{chr(code)}", f"{chr(code)}a", f"a{chr(code)}b"):
        assert not is_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "../a", "a/b", "/etc", "..", ".a", "-a", "a\\b", "a\0", "a\n", "a\u202eb", "a<b", "a>", 'a"b', "a*", "a|b",
        "a\u00a0b", "a\ud800", "\u0301a", "a:", "a:x", "a:nan", "a:inf", "a:1_0",
        "a:１", "a: 1", "a:1:2", "a:1e99", "a:1e999", "a:101", "a,a", "a:1,a:2", "x" * 129, "x," * 3000,
        "a,b,c,d,e,f,g,h,i",
    ],
)  # fmt: skip
def test_what_is_no_name_or_no_scale_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)
