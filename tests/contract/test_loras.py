"""Which LoRAs a text names: read back what was written, whatever else is refused, and no name leads out of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.loras import MAX_LORAS, MAX_SCALE, LoraReference, is_name, read

NAME = st.text(min_size=1, max_size=40).filter(is_name) | st.from_regex(
    r"[A-Za-z0-9_(\[+][\w .()\[\]{}'!&-]{0,40}", fullmatch=True
).filter(is_name)
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
