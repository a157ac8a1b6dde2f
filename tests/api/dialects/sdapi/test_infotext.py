"""Infotexts as the pipeline writes them are read back; the text of any PNG is read within bounds."""

from __future__ import annotations

import io
import struct
import zlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from api.dialects.sdapi import infotext as infotext_module
from api.dialects.sdapi.infotext import parse, texts
from contract import a1111
from contract.image import ImageParameters
from pipeline.pixels.infotext import infotext

words = st.text(st.sampled_from('ab ,:"()\\é'), max_size=30).map(str.strip)


@given(st.lists(words, min_size=1, max_size=3), words, st.integers(0, 2**63 - 1), words)
def test_an_infotext_is_read_back(prompt: list[str], negative: str, seed: int, model: str) -> None:
    text = "a " + "\n".join(prompt).strip()
    parameters = ImageParameters(text, seed, 64, 48, negative_prompt=negative)
    read = parse(infotext(parameters, "dpm++2m", {"model": model, "version": "1"}))
    assert a1111.read(read["Prompt"]) == "\n".join(map(str.strip, text.split("\n"))).strip()
    assert a1111.read(read["Negative prompt"]) == negative
    assert read.get("Model", "") == model
    assert (read["Seed"], read["Sampler"], read["Size"]) == (str(seed), "DPM++ 2M", "64x48")


def test_words_alone_are_a_prompt() -> None:
    assert parse("a cat, a: dog") == {"Prompt": "a cat, a: dog", "Negative prompt": ""}
    assert parse("") == {"Prompt": "", "Negative prompt": ""}


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def test_every_kind_of_text_is_read() -> None:
    info, stream = PngImagePlugin.PngInfo(), io.BytesIO()
    info.add_text("parameters", "a cat")
    info.add_text("Comment", "x" * 1000, zip=True)
    info.add_itxt("Título", "été ✓", zip=True)
    info.add_itxt("plain", "été")
    Image.new("RGB", (1, 1)).save(stream, "PNG", pnginfo=info)
    assert texts(stream.getvalue()) == {
        "parameters": "a cat", "Comment": "x" * 1000, "Título": "été ✓", "plain": "été",
    }  # fmt: skip


def test_a_file_that_inflates_is_left_out() -> None:
    bomb = zlib.compress(bytes(64 * 2**20))
    for large in ((b"zTXt", b"a\0\0" + bomb), (b"iTXt", b"b\0\1\0\0\0" + bomb)):
        assert texts(png((b"tEXt", b"c\0kept"), large)) == {"c": "kept"}
    workflow = (b"tEXt", b"workflow\0" + bytes(2**20 + 1))  # no work: what follows is read
    assert texts(png(workflow, (b"zTXt", b"d\0\0damaged"), (b"tEXt", b"c\0kept"))) == {"c": "kept"}
    several = texts(png(*((b"tEXt", b"k%d\0v" % k) for k in range(1000))))
    assert len(several) == 64


@pytest.mark.parametrize(
    "chunk",
    [
        (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20 + 1), 9)), (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**18), 9)),
        (b"iTXt", b"b\0\1\0\0\0" + zlib.compress(b"\xff" * 2**20, 9)),
        (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20), 9)[:-9] + bytes(9)), (b"zTXt", b""), (b"tEXt", b"x"),
    ],
)  # fmt: skip
def test_thousands_of_chunks_are_no_work(chunk: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are kept, too long, no text or damaged."""
    work = Counter[str]()

    class Inflater:
        def __init__(self) -> None:
            self._real = zlib.decompressobj()

        def decompress(self, data: bytes, limit: int) -> bytes:
            inflated = self._real.decompress(data, limit)
            work["inflated"] += len(inflated)
            return inflated

    read = infotext_module._text

    def counted(*given: Any) -> Any:
        work["chunks"] += 1
        return read(*given)

    monkeypatch.setattr(infotext_module, "_text", counted)
    monkeypatch.setattr(infotext_module, "zlib", SimpleNamespace(decompressobj=Inflater, error=zlib.error))
    texts(png(*[chunk] * 4000))
    assert 0 < work["chunks"] <= 64
    assert work["inflated"] <= 2**20 + 1


@given(st.binary(max_size=200), st.sampled_from([b"tEXt", b"zTXt", b"iTXt"]))
def test_any_bytes_are_read_as_what_they_are(content: bytes, kind: bytes) -> None:
    """As one chunk with something behind the file; alone they are no PNG."""
    assert texts(content) == {}
    keyword, separator, text = content.partition(b"\0")
    valid = separator and 0 < len(keyword) < 80
    expected = {keyword.decode("latin-1"): text.decode("latin-1")} if valid else {}
    actual = texts(png((kind, content)) + content)
    assert actual == expected if kind == b"tEXt" else actual.keys() <= expected.keys()
