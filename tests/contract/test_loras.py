"""Which LoRAs a text names: read back what was written, whatever else is refused, and no name leads out of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.loras import MAX_LORAS, MAX_SCALE, LoraReference, is_name, read

NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,40}", fullmatch=True)
SCALE = st.floats(-MAX_SCALE, MAX_SCALE).map(lambda scale: float(f"{scale:.6g}"))


@given(named=st.lists(st.tuples(NAME, SCALE), max_size=MAX_LORAS, unique_by=lambda pair: pair[0]), space=st.booleans())
def test_what_is_written_is_read(named: list[tuple[str, float]], space: bool) -> None:
    text = (" , " if space else ",").join(f"{name}:{scale:.6g}" for name, scale in named)
    assert read(text) == tuple(LoraReference(*pair) for pair in named)


def test_a_scale_that_is_not_given_is_one() -> None:
    assert read("a, b:0.5,c:-1e1,") == (LoraReference("a", 1.0), LoraReference("b", 0.5), LoraReference("c", -10.0))
    assert read("") == read(" , ") == ()


@given(text=st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = read(text)
    except ValueError as error:
        assert len(str(error)) < 250 and str(error).isascii()
    else:
        folder = Path("/loras")
        assert all((folder / f"{lora.name}.safetensors").parent == folder for lora in found)
        assert all(is_name(lora.name) and abs(lora.scale) <= MAX_SCALE for lora in found)


@pytest.mark.parametrize(
    "text",
    [
        "../a", "a/b", "/etc", "..", ".a", "-a", "a b", "a\0", "a\n", "ä", "a:", "a:x", "a:nan", "a:inf", "a:1_0",
        "a:１", "a: 1", "a:1:2", "a:1e99", "a:1e999", "a:101", "a,a", "a:1,a:2", "x" * 129, "x," * 3000,
        "a,b,c,d,e,f,g,h,i",
    ],
)  # fmt: skip
def test_what_is_no_name_or_no_scale_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)
