"""Generates hostile HTTP requests from a seed: bodies that are expensive to parse, inconsistent, or malformed."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.faults.payloads import chunk, form_body, png

JSON_PATHS = (
    "/v1/jobs", "/v1/images/generations", "/v1/images/edits", "/v1/chat/completions", "/v1/completions", "/v1/batches",
    "/v1/embeddings", "/", "/v1/models/emoji-xl",
)  # fmt: skip
FORM_PATHS = ("/v1/images/edits", "/v1/files")
_MIB = 2**20


@dataclass(frozen=True)
class HostileRequest:
    """One request. `headers` are sent as they stand; a Content-Length is added unless they say how the body ends."""

    kind: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    method: str = "POST"


def requests(seed: int) -> Iterator[HostileRequest]:
    """An endless sequence. Every request must be rejected: what is valid as JSON has an unknown field."""
    draw = random.Random(seed)
    while True:
        yield draw.choice(_KINDS)(draw)


def _json(kind: str, draw: random.Random, body: bytes, path: str = "", **headers: str) -> HostileRequest:
    return HostileRequest(kind, path or draw.choice(JSON_PATHS), body, {"Content-Type": "application/json"} | headers)


def _sound(draw: random.Random, **more: object) -> bytes:
    """An image or text request with an unknown field, so that it never reaches a worker."""
    fields = {"type": "image", "prompt": "a cat", "messages": [{"role": "user", "content": "hi"}], "unknown": 1}
    return json.dumps(fields | more).encode()


def _nested(draw: random.Random) -> HostileRequest:
    depth = draw.choice((31, 32, 33, 500, 5_000, 200_000))
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
    depth = min(depth, _MIB // (len(opening) + len(closing)) - 32)
    inner = opening * depth + b"1" + closing * draw.choice((depth, depth - 1, 0))
    return _json("nested", draw, b'{"unknown": 1, "prompt": ' + inner + b"}")


def _many(draw: random.Random) -> HostileRequest:
    """As many values as bytes allow."""
    piece = draw.choice((b"[],", b"{},", b"0,", b'"",', b'{"":0},', b"1e9,", b"null,"))
    size = draw.choice((1_000, 30_000, 300_000, _MIB - 100, _MIB + 1))
    return _json("many values", draw, b'{"unknown": 1, "prompt": [' + piece * (size // len(piece)) + b"0]}")


def _number(draw: random.Random) -> HostileRequest:
    digits = draw.choice(("9" * 400_000, "1e999999999", "-0", "1" * 5000, "0x10", "NaN", "-Infinity", "1e-400", "٣"))
    name = draw.choice(("seed", "n", "steps", "size", "temperature", "max_tokens", "priority", "wait_s"))
    return _json("number", draw, f'{{"prompt": "a", "unknown": 1, "{name}": {digits}}}'.encode())


def _bytes(draw: random.Random) -> HostileRequest:
    raw = draw.choice((
        b"", b"\x00" * 1000, b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b'{"prompt": "\xc3"}', b'{"prompt": "\\ud800"}',
        b'{"unknown": 1, "prompt": "\\u0000"}', b"\x1f\x8b\x08", draw.randbytes(draw.choice((3, 300, 30_000))),
        b"null",
        b'"' + b"a" * 9999,
    ))  # fmt: skip
    return _json("bytes", draw, raw)


def _repeated(draw: random.Random) -> HostileRequest:
    count = draw.choice((2, 5_000, 60_000))
    names = (b'"prompt":1,' if draw.random() < 0.5 else b'"%d":1,' % i for i in range(count))
    return _json("repeated fields", draw, b"{" + b"".join(names) + b'"seed":1}')


def _text(draw: random.Random) -> HostileRequest:
    piece = draw.choice(
        ("\U0001f600", "a\u0301\u0316\u0301", "\u202e", "((((a:1.5", "BREAK ", "<lora:../../etc:1>", "\n", " ")
    )
    prompt = piece * (draw.choice((100, 10_000, 200_000)) // len(piece))
    return _json(
        "prompt",
        draw,
        _sound(draw, prompt=prompt[: 900_000 // 4], messages=[{"role": "user", "content": prompt[:50_000]}]),
    )


def _schema(draw: random.Random) -> HostileRequest:
    """A JSON schema that is large, refers to itself, or matches by a costly pattern."""
    choices: tuple[dict[str, object], ...] = (
        {"$ref": "#"}, {"allOf": [{"$ref": "#"}] * 50}, {"type": "string", "pattern": "(a+)+" * 30 + "$"},
        {"enum": ["x" * 50] * 5_000}, {"type": "array", "minItems": 10**9}, {"$ref": "http://169.254.169.254/"},
        {"properties": {str(i): {"type": "string"} for i in range(4_000)}},
        {"anyOf": [{"const": i} for i in range(9_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": ["string", "null"]} for i in range(1_500)}},
        {"type": "string", "pattern": "(" + "|".join(f"(x{{{i}}}y?)*" for i in range(200)) + ")"},
    )  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": draw.choice(choices)}}
    return _json("schema", draw, _sound(draw, response_format=form), "/v1/chat/completions")


def _address(draw: random.Random) -> HostileRequest:
    url = draw.choice((
        "http://127.0.0.1:1/", "http://[::ffff:169.254.169.254]/", "file:///etc/passwd", "gopher://x",
        "http://a" + "b" * 70_000,
        "data:image/png;base64," + "A" * 500_000, "data:,", "http://0x7f.1/", "//", "http://user:pass@localhost/",
    ))  # fmt: skip
    fields = {draw.choice(("image", "mask", "webhook_url", "init_image")): url}
    return _json("address", draw, _sound(draw, **fields))


def _jpeg(draw: random.Random) -> bytes:
    """A progressive JPEG whose last scan comes thousands of times."""
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (512, 512), (9, 90, 200)).save(made, "JPEG", progressive=True)
    data = made.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * draw.choice((10, 3_000)) + data[-2:]


def _upload(draw: random.Random) -> HostileRequest:
    picture = draw.choice((
        lambda: png(1, 200_000), lambda: png(200_000, 1), lambda: png(8, 8, claims=2**31 - 1),
        lambda: png(4_000, 4_000),
        lambda: _jpeg(draw), lambda: png(64, 64)[:-20], lambda: b"GIF89a" + draw.randbytes(90), lambda: b"<svg/>",
    ))()  # fmt: skip
    return _form("picture", draw, {"image": picture, "unknown": b"1", "prompt": b"a cat"})


def _form(kind: str, draw: random.Random, parts: dict[str, bytes], path: str = "/v1/images/edits") -> HostileRequest:
    files = {name: parts.pop(name) for name in ("image", "file") if name in parts}
    return HostileRequest(kind, path, form_body(parts, files), {"Content-Type": "multipart/form-data; boundary=edge"})


def _broken_form(draw: random.Random) -> HostileRequest:
    kind = "multipart/form-data" + draw.choice(("", "; boundary=", "; boundary=edge", '; boundary="' + "e" * 200 + '"'))
    body = draw.choice((
        b"--edge\r\n" * 20_000, b"--edge\r\nContent-Disposition: form-data; name=" + b"a" * 100_000,
        b"--edge\r\n" + b"X: y\r\n" * 50_000, b"", b"--edge--\r\n", b"\r\n" * 100_000, draw.randbytes(5_000),
        b"".join(b'--edge\r\nContent-Disposition: form-data; name="%d"\r\n\r\n\r\n' % i for i in range(3_000)),
    ))  # fmt: skip
    return HostileRequest("broken form", draw.choice(FORM_PATHS), body, {"Content-Type": kind})


def _lines(draw: random.Random) -> HostileRequest:
    """A file of lines that are no batch, as a picture or for no purpose: for a batch it would be stored."""
    line = draw.choice((b"[]\n", b"{}\n", b"\n", b"{" * 3_000 + b"\n", b'{"custom_id": "a"}\n', b"\xff\n", b"0\n"))
    data = line * (draw.choice((1_000, 100_000, _MIB)) // len(line))
    return _form(
        "lines",
        draw,
        {"purpose": draw.choice((b"vision", b"", b"x" * 999)), "file": data, "unknown": b"1"},
        "/v1/files",
    )


def _charset(draw: random.Random) -> HostileRequest:
    """A form in an encoding that is costly to decode, or none of text."""
    given = _form("charset", draw, {"prompt": b"a" * draw.choice((10, 100_000)) + b"-9", "unknown": b"1"})
    charset = draw.choice(
        ("punycode", "idna", "utf-7", "utf-16", "rot13", "zlib", "x" * 500, '"', "utf-8; charset=idna")
    )
    return HostileRequest("charset", given.path, given.body, {
        "Content-Type": f"{given.headers['Content-Type']}; charset={charset}"
    })  # fmt: skip


def _stuffed(draw: random.Random) -> HostileRequest:
    """A small PNG with tens of thousands of chunks, empty or of text."""
    name, data = draw.choice(
        ((b"juNk", b""), (b"tEXt", b"a\x00b"), (b"IDAT", b""), (b"zTXt", b"a\x00\x00x"), (b"fdAT", b""))
    )
    picture = png(8, 8, chunk(name, data) * draw.choice((5_000, 40_000)))
    return _form("stuffed picture", draw, {"image": picture, "unknown": b"1", "prompt": b"a cat"})


def _headers(draw: random.Random) -> HostileRequest:
    given = draw.choice((
        {"Content-Type": "application/json", "Content-Length": "99999999999999999999"},
        {"Content-Type": "application/json", "Content-Length": "-1"}, {"Content-Type": "x" * 5_000},
        {"Content-Type": "application/json", "Transfer-Encoding": "chunked, chunked"},
        {"Content-Type": "application/json", "Expect": "100-continue"},
        {"Content-Type": "application/json; charset=utf-7"},
        {"Content-Type": "application/json", "Authorization": "Bearer " + "x" * 9_000},
        {"Content-Type": "application/json", "X-Request-Id": "é" * 100}, {"Content-Type": "text/plain"},
        {"Content-Type": "application/json", "Host": "evil.example"},
        {"Content-Type": "application/json", "Range": "bytes=0-,0-"},
    ))  # fmt: skip
    return HostileRequest("headers", draw.choice(JSON_PATHS), _sound(draw), dict(given))


def _packed(draw: random.Random) -> HostileRequest:
    body = gzip.compress(b"[" * draw.choice((100, 2_000_000)), mtime=0)
    return _json("compressed", draw, body, **{"Content-Encoding": draw.choice(("gzip", "deflate", "br", "gzip, gzip"))})


def _path(draw: random.Random) -> HostileRequest:
    name = draw.choice(("..%2f..%2fetc", "%00", "a" * 3_000, "%ff%fe", "job_" + "0" * 24, "*", "%7b%7d", "."))
    path = draw.choice((
        "/v1/jobs/{}", "/v1/jobs/{}/events", "/v1/files/{}/content", "/v1/batches/{}", "/v1/models/{}",
        "/v1/jobs?after={}", "/v1/jobs?limit={}",
    ))  # fmt: skip
    method = draw.choice(("GET", "DELETE", "PUT", "PATCH", "POST"))
    return HostileRequest("path", path.format(name), _sound(draw) if method != "GET" else b"", method=method)


BODIES: tuple[Callable[[random.Random], HostileRequest], ...] = (
    _nested, _many, _number, _bytes, _repeated, _text, _schema, _address, _upload, _broken_form, _lines, _charset,
    _stuffed, _headers, _packed,
)  # fmt: skip
_KINDS = (*BODIES, _path)
