"""Tensors of safetensors files are read as the library reads them, and what it refuses is refused."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from pipeline.extensions.weight_files import PICKLE, tensors

_TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
WHOLE_NUMBERS = b'{"a": {"dtype": "U16", "shape": [0], "data_offsets": [0, 0]}}'
_ENTRIES = st.tuples(st.sampled_from(_TYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99))
_FILES = st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), _ENTRIES, max_size=5)


def _file(made: dict[str, tuple[torch.dtype, list[int], int]]) -> bytes:
    found = {}
    for name, (dtype, shape, seed) in made.items():
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        found[name] = (10 * values).to(dtype)
    return save(found, {"a": "note"})


@given(made=_FILES)
def test_tensors_are_those_of_the_library(made: dict[str, tuple[torch.dtype, list[int], int]]) -> None:
    data = _file(made)
    ours, theirs = tensors(data), load(data)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape and torch.equal(ours[name].double(), tensor.double())
        assert ours[name].dtype == (torch.float16 if tensor.dtype in _TYPES[-2:] else tensor.dtype)


@given(
    made=_FILES,
    places=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    cut=st.integers(1, 1000),
)
def test_what_the_library_refuses_is_refused(
    made: dict[str, tuple[torch.dtype, list[int], int]], places: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(_file(made))
    for at, value in places:
        data[at % len(data)] = value
    whole = bytes(data[: cut * len(data) // 1000])
    try:
        theirs = load(whole)
    except Exception:
        with pytest.raises(ValueError):
            tensors(whole)
        return
    try:
        ours = tensors(whole)
    except ValueError:
        return  # stricter
    assert ours.keys() == theirs.keys() and all(ours[name].shape == theirs[name].shape for name in ours)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "has no header"),
        (struct.pack("<Q", 2**40) + b"{}", "has no header"),
        (struct.pack("<Q", 2) + b"[]", "its header is no object"),
        (struct.pack("<Q", 2) + b"{}" + b"more", "4 bytes of tensors, and 0 are in its header"),
        (struct.pack("<Q", len(WHOLE_NUMBERS)) + WHOLE_NUMBERS, "'a' is of type 'U16'"),
        (b"\x80\x04.", PICKLE),
        (b"PK\x03\x04", PICKLE),  # torch's own
    ],
)
def test_what_is_wrong_is_told(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tensors(data)
