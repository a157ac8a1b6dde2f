"""Headers of safetensors files: honest ones are read as the library does, hostile ones cost next to nothing."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoints import checkpoint, folder, safetensors_header, tiny
from pipeline.checkpoints.folder import Part
from pipeline.checkpoints.load import load
from pipeline.checkpoints.safetensors_header import MAX_BYTES, MAX_TENSORS, parse
from pipeline.extensions import control_file, ip_adapter_file, weight_files
from pipeline.extensions.adapters import LoraFolder
from pipeline.extensions.upscaling import UpscalerFolder
from pipeline.text.textual_inversion import EmbeddingFolder

_NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(lambda name: name != "__metadata__")
_TENSORS = st.dictionaries(_NAMES, st.lists(st.integers(0, 5), max_size=3), max_size=6)


def _table(shapes: dict[str, list[int]], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, shape in shapes.items():
        size = 2 * int(torch.Size(shape).numel())
        found[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return found


@given(
    shapes=_TENSORS, metadata=st.none() | st.dictionaries(_NAMES, st.text(max_size=30), max_size=4), ascii=st.booleans()
)
def test_what_is_written_is_read(shapes: dict[str, list[int]], metadata: dict[str, str] | None, ascii: bool) -> None:
    whole = _table(shapes, metadata)
    for spaced in (None, 1):
        text = json.dumps(whole, ensure_ascii=ascii, indent=spaced).encode("utf-8", "surrogatepass") + b"   "
        try:
            text.decode()
        except UnicodeDecodeError:
            return
        found = parse(text)
        assert {name: [*entry.shape] for name, entry in found.tensors.items()} == shapes
        assert found.metadata == (metadata or {})
        assert all([*found.tensors[name][2:]] == whole[name]["data_offsets"] for name in shapes)


@given(shapes=_TENSORS, data=st.data())
def test_a_damaged_header_is_refused_or_read_and_nothing_else(
    shapes: dict[str, list[int]], data: st.DataObject
) -> None:
    text = bytearray(json.dumps(_table(shapes, {"a": "b\n"})).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b'"\\{}[]:,019.eE-\x00 \xff'))
    try:
        found = parse(bytes(text))
    except ValueError:
        return
    theirs = json.loads(bytes(text))
    assert found.metadata == (theirs.get("__metadata__") or {})
    assert found.tensors.keys() == theirs.keys() - {"__metadata__"}


_ENTRY = b'{"dtype":"F16","shape":[0],"data_offsets":[0,0]}'
HOSTILE = {
    "brackets": (b'{"a":' + b"[]," * (MAX_BYTES // 3 - 3), "no type, shape and place"),
    "nested": (b"[" * MAX_BYTES, "no object"),
    "nested metadata": (b'{"__metadata__":' + b"[" * (MAX_BYTES - 30), "metadata are no object"),
    "many tensors": (b"{" + b",".join(b'"%d":%s' % (n, _ENTRY) for n in range(120_000)) + b"}",
                     "more than 16384 tensors"),
    "many notes": (b'{"__metadata__":{' + b",".join(b'"%d":""' % n for n in range(9_000)) + b"}}",
                   "more than 1024 entries"),
    "a long name": (b'{"' + b"x" * 200_000 + b'":' + _ENTRY + b"}", "no name of at most 512 characters"),
    "a long escaped name": (b'{"' + b"\\n" * 2_000_000 + b'":' + _ENTRY + b"}", "no name of at most 512 characters"),
    "an endless text": (b'{"__metadata__":{"a":"' + b"\\n" * 4_000_000, "is no text"),
    "an endless entry": (b'{"a":{"dtype":"' + b"x" * 1_000_000, "no type, shape and place"),
    "twice": (b'{"a":' + _ENTRY + b',"a":' + _ENTRY + b"}", "names 'a' twice"),
    "infinity": (b'{"a":{"dtype":"F16","shape":[Infinity],"data_offsets":[0,0]}}', "no whole numbers"),
    "a fraction": (b'{"a":{"dtype":"F16","shape":[1.0],"data_offsets":[0,2]}}', "no whole numbers"),
    "a truth": (b'{"a":{"dtype":"F16","shape":[true],"data_offsets":[0,2]}}', "no whole numbers"),
    "less than nothing": (b'{"a":{"dtype":"F16","shape":[-1,-1],"data_offsets":[0,2]}}', "no whole numbers"),
    "digits": (b'{"a":{"dtype":"F16","shape":[' + b"9" * 900 + b'],"data_offsets":[0,2]}}', "no whole numbers"),
    "many sides": (b'{"a":{"dtype":"F16","shape":[' + b"1," * 99 + b'1],"data_offsets":[0,2]}}', "type or shape"),
    "backwards": (b'{"a":{"dtype":"F4","shape":[],"data_offsets":[2,0]}}', "lies at 2 to 0"),
    "overlapping": (b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"F16","shape":[1],'
                    b'"data_offsets":[2,4]}}', "'b' lies at 2 to 4"),
    "a gap": (b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[2,6]}}', "'a' lies at 2 to 6"),
    "another size": (b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,6]}}', "'a' lies at 0 to 6"),
    "more behind it": (b"{} []", "goes on after its end"),
    "no text": (b'{"\xff":' + _ENTRY + b"}", "not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_headers_are_refused_in_small_calls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser, which holds the GIL, never gets more than an entry, a name or half a million characters."""
    text, told = HOSTILE[kind]
    longest = 0
    real = json.loads

    def spied(given: str) -> Any:
        nonlocal longest
        longest = max(longest, len(given))
        return real(given)

    monkeypatch.setattr(safetensors_header.json, "loads", spied)
    with pytest.raises(ValueError, match=told):
        parse(text)
    assert longest <= 2**19


def test_at_most_so_many_tensors_are_read() -> None:
    shapes = {str(n): [0] for n in range(MAX_TENSORS)}
    assert len(parse(json.dumps(_table(shapes)).encode()).tensors) == MAX_TENSORS
    with pytest.raises(ValueError, match="more than 16384 tensors"):
        parse(json.dumps(_table({**shapes, "more": [0]})).encode())


def test_a_long_text_of_the_metadata_is_left_out_and_told_where_it_is_needed() -> None:
    found = parse(json.dumps(_table({}, {"long": "\n" * 400_000, "short": "é\n"})).encode())
    assert found.metadata == {"short": "é\n"} and found.text("short") == "é\n" and found.text("none") is None
    with pytest.raises(ValueError, match=r"its metadata's long has 800002 characters"):
        found.text("long")


@functools.cache
def _model() -> Any:
    return load(tiny.TINY)


def _read_by_all(path: Path, model: Any = None) -> dict[str, Any]:
    """What reads the file, by kind."""
    where, name = path.parent, path.stem
    part = Part("network")
    return {
        "lora": lambda: LoraFolder(where, model, 2**40).check(name),
        "control": lambda: control_file.check_headers(name, path),
        "control itself": lambda: control_file.read(name, path, model, torch.float32),
        "IP-Adapter": lambda: ip_adapter_file.read(name, path, model, torch.device("cpu")),
        "embedding": lambda: EmbeddingFolder(where, {}, 8).get(name),
        "upscaler": lambda: UpscalerFolder(where).get(name),
        "checkpoint": lambda: checkpoint.read_header(path),
        "part": lambda: folder._check_safetensors(path, old_buffers=part.kind == "encoder"),
        "tensors": lambda: weight_files.tensors(path.read_bytes()),
    }


@pytest.mark.parametrize("kind", _read_by_all(Path("x/y")))
def test_every_reader_goes_through_the_same_limits(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    read = _read_by_all(path, _model())[kind]
    path.write_bytes(struct.pack("<Q", MAX_BYTES + 8) + b"{" + b" " * (MAX_BYTES + 7))
    with pytest.raises(ValueError, match=f"its header has {MAX_BYTES + 8} bytes, and at most {MAX_BYTES} are read"):
        read()
    text = HOSTILE["many tensors"][0]
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match="it has more than 16384 tensors"):
        read()
