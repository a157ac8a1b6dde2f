"""Sends hostile forms, mutated pictures and JSON schemas to an API: `python -m tests.faults.uploads --bodies 10000`.

Bodies are drawn by hypothesis from grammars of forms, of PNG, JPEG and WebP files, and of chats with a JSON schema
(tests/schemas.py), which a text worker in this process compiles and answers. They are sent with a key that has no rate
limit. Prints the statuses, the gaps of /healthz (asked by a process of its own, beside how late the machine woke
that up) and the API's memory. The exit code is 1 if an answer is a 5xx other than a 503 with a code, names nothing that
is wrong, or does not come, or if what the key has left in Redis in the end is large, or not counted.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import struct
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

import httpx2
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image

from core.jobs.keyring import Keyring
from tests.api.easel import Easel
from tests.api.world import eventually
from tests.faults.histories.accounts import left_by
from tests.faults.histories.checker import RECORD_BYTES
from tests.faults.lone_api import LoneApi, lone_api
from tests.faults.monitor import Monitor
from tests.faults.payloads import CARD_OF_NINE, chunk, form_body
from tests.schemas import hostile

_ROUND = 500  # bodies of one run of hypothesis, which keeps all that it has drawn
_MOST_BYTES = 64 * 2**20  # of a form's repeated parts: far more than an API reads of one
EDITS, FILES, JOBS, INFERENCE = "/v1/images/edits", "/v1/files", "/v1/jobs", "/"
CHAT = "/v1/chat/completions"
T = TypeVar("T")
# Codes of refusals that may name no field: the whole body is wrong, or the field's name may not be repeated.
_NAMELESS = {"invalid_body", "body_too_large", "unknown_parameter", "repeated_field", "invalid_type"}


@dataclass(frozen=True)
class Body:
    """One request; `repr` is cut, so that a failing example can be read."""

    path: str
    content_type: str
    content: bytes = field(repr=False)

    def send(self, client: httpx2.Client) -> httpx2.Response:
        return client.post(self.path, content=self.content, headers={"Content-Type": self.content_type})

    def __repr__(self) -> str:
        return f"Body({self.path!r}, {self.content_type!r}, {len(self.content)} bytes: {self.content[:300]!r})"


def fault(answer: httpx2.Response) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if answer.status_code < 400:
        return None
    error = answer.json()["error"]
    if isinstance(error, str):  # InferenceClient's form
        error = {**answer.json(), "message": error}
    if (answer.status_code, error["code"]) == (504, "expired"):  # its own deadline
        return None
    if answer.status_code >= 500 and (answer.status_code != 503 or not error["code"]):
        return f"{answer.status_code}: {answer.text}"
    named = error["param"] or error["code"] in _NAMELESS
    return None if named and error["message"] else f"{answer.status_code} names nothing: {answer.text}"


@contextmanager
def site(folder: Path, *, texts: bool = False) -> Iterator[LoneApi]:
    """An API whose worker draws at once. `texts`: a real worker of texts with a tiny model, in this process, too."""
    with ExitStack() as open_:
        running = open_.enter_context(lone_api(folder, CARD_OF_NINE, keyed=True))
        open_.enter_context(Easel(running.worker))
        if texts:
            from tests.api.writing import TextWorker
            from tests.llm import stage

            open_.enter_context(TextWorker(running.settings, stage.small()))
            eventually(lambda: len(running.client.get("/v1/models").json()["data"]) == 2)
        yield running


# -- pictures ----------------------------------------------------------------------------------------------------------


@cache
def _pictures() -> tuple[bytes, ...]:
    """Sound pictures of several modes and encoders."""
    grey = Image.linear_gradient("L").resize((40, 24))
    color = grey.convert("RGB")
    found = [_saved(grey.convert(mode), "PNG") for mode in ("1", "L", "P", "RGB", "RGBA", "I;16")]
    found += [_saved(grey, "PNG", optimize=True), _saved(grey, "JPEG"), _saved(grey.convert("CMYK"), "JPEG")]
    found += [_saved(color, "JPEG"), _saved(color, "JPEG", progressive=True)]
    found += [_saved(color, "JPEG", quality=5, subsampling=2), _saved(color, "WEBP")]
    found.append(_saved(grey.convert("RGBA"), "WEBP", lossless=True))
    frames = [color.rotate(90 * k) for k in (1, 2)]
    found += [_saved(color, form, save_all=True, append_images=frames) for form in ("PNG", "WEBP")]
    exif = Image.Exif()
    exif[0x0112] = 6
    found += [_saved(color, form, exif=exif) for form in ("JPEG", "WEBP", "PNG")]
    return tuple(found)


def _saved(image: Image.Image, form: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def split(data: bytes) -> list[bytes]:
    """The head and the chunks of a sound picture; a JPEG's scans are part of their segment."""
    if data[:2] == b"\xff\xd8":
        parts, at = [data[:2]], 2
        while at < len(data):
            end = at + 2 if data[at + 1] == 0xD9 else at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            if data[at + 1] == 0xDA:
                while end < len(data) and (data[end] != 0xFF or data[end + 1] in (0, *range(0xD0, 0xD8))):
                    end += 1
            parts.append(data[at:end])
            at = end
        return parts
    png = data[:4] != b"RIFF"
    parts, at = [data[: 8 if png else 12]], 8 if png else 12
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big") if png else int.from_bytes(data[at + 4 : at + 8], "little")
        end = at + (12 + length if png else 8 + length + length % 2)
        parts.append(data[at:end])
        at = end
    return parts


_BOMBS = (
    chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20))), chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**21))),
    chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)), chunk(b"IDAT"), chunk(b"tRNS", bytes(300)),
    chunk(b"PLTE", bytes(900)), chunk(b"IHDR", struct.pack(">IIBBBBB", 2**31 - 1, 1, 16, 6, 0, 0, 1)),
    chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff" + bytes(80)), chunk(b"IEND"), b"\xff\xd9", b"\xff\xda\x00\x02",
    b"\xff\xe1\x00\x02", b"\xff\xe1\x00\x10Exif\0\0MM\0*\0\0\0\x08", b"\xff\xd0", b"\xff" * 50, b"\xff\xdd\x00\x04\0\1",
    b"\xff\xc0\x00\x0b\x08\xff\xff\xff\xff\x01\x01\x11\x00", b"\xff\xc4\x00\x02", b"EXIF\x04\0\0\0MM\0*",
    b"VP8X\x0a\0\0\0\xff\0\0\0" + b"\xff" * 6, b"ANMF" + struct.pack("<I", 2**32 - 1), b"VP8 \0\0\0\0",
)  # fmt: skip


def _any(draw: st.DrawFn, *values: T) -> T:
    return draw(st.sampled_from(values))


@st.composite
def pictures(draw: st.DrawFn) -> bytes:
    """A picture with up to four mutations: of whole chunks first, of bytes then."""
    parts = split(draw(st.sampled_from(_pictures())))
    for _ in range(draw(st.integers(0, 2))):
        k, j = (draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        match draw(st.integers(0, 4)):
            case 0:
                parts[k : k + 1] = [parts[k]] * _any(draw, 2, 30, 1_100, 30_000)
            case 1:
                del parts[k]
            case 2:
                parts[k], parts[j] = parts[j], parts[k]
            case 3:
                parts[k:k] = [_any(draw, *_BOMBS)] * _any(draw, 1, 1, 3, 2_000)
            case _:
                parts[k:k] = split(_any(draw, *_pictures()))
        parts = parts or [b""]
    data = bytearray(b"".join(parts))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, min(len(data), 400)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at:at] = draw(st.binary(max_size=20))
            case 1:
                data[at : at + 4] = _any(draw, b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\xff\xff")
            case 2:
                del data[draw(st.integers(0, len(data))) :]
            case 3:
                data += bytes(_any(draw, 1, 1_000, 2**20))
            case _:
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
    return bytes(data)


# -- forms and JSON bodies ---------------------------------------------------------------------------------------------

_NAMES = ("prompt", "image", "mask", "image[]", "n", "size", "steps", "purpose", "file", "control", "control_image",
          "image_prompt", "image_prompts", "outpaint", "stream", "soft_mask", "", "ä", 'a"b', "a" * 300)  # fmt: skip
_VALUES = ("a cat", "1", "-1", "true", "64x64", "vision", "batch", "{", "*",
           '{"left":8}', "[1,2", "1e999", "\ud7ff", "\0", "",
           '[{"model":"edges"}]', "9" * 4000, "é" * 2000)  # fmt: skip
_TYPES = ("multipart/form-data; boundary=edge",) * 12 + (
    'multipart/form-data; boundary="edge"; charset=utf-8', "multipart/form-data", "multipart/form-data; boundary=",
    "multipart/form-data; boundary=other", "multipart/form-data; boundary=edge; charset=punycode",
    "multipart/form-data; boundary=edge; charset=utf-16", "multipart/form-data" + ";" * 400,
    "multipart/mixed; boundary=edge",
    "multipart/form-data; boundary=" + "e" * 250, 'multipart/form-data; boundary="' + '";' * 200,
    "application/x-www-form-urlencoded",
)  # fmt: skip
_HEADERS = (
    b"", b"Content-Type: image/png\r\n", b"X: y\r\n" * 9, b"X: " + b"y" * 5_000 + b"\r\n", b"Content-Type: a\r\n b\r\n",
    b"Content-Transfer-Encoding: base64\r\n", b"Content-Disposition: form-data\r\n", b": \r\n", b"X:\xff\r\n", b"\r\n",
)  # fmt: skip


@st.composite
def _part(draw: st.DrawFn) -> bytes:
    name, value = _any(draw, *_NAMES).encode(), _any(draw, *_VALUES).encode("utf-8", "replace")
    file = _any(draw, b"", b"", b'; filename="x.png"', b'; filename="' + b'a";' * 400, b"; filename*=utf-16''a")
    data = draw(pictures()) if file and draw(st.booleans()) else value
    head = b'Content-Disposition: form-data; name="' + name + b'"' + file + b"\r\n"
    return head + _any(draw, *_HEADERS) + b"\r\n" + data + b"\r\n"


@st.composite
def forms(draw: st.DrawFn) -> Body:
    """Parts of any kind between boundaries that may be broken."""
    parts = [b"--edge\r\n" + part for part in draw(st.lists(_part(), max_size=6))]
    if parts and draw(st.integers(0, 9)) == 0:
        parts *= min(_any(draw, 2, 60, 200), max(2, _MOST_BYTES // sum(map(len, parts))))
    body = b"".join(parts) + _any(draw, *[b"--edge--\r\n"] * 8, b"", b"--edge", b"--edge\r\n", b"--edge--x")
    if draw(st.integers(0, 7)) == 0:
        body = _any(draw, body.replace(b"\r\n", b"\n"), body[: len(body) // 2], b"\r\n" + body, body * 2)
    return Body(_any(draw, EDITS, FILES), _any(draw, *_TYPES), body)


def _inline(data: bytes) -> dict[str, str]:
    return {"image_url": "data:image/png;base64," + base64.b64encode(data).decode()}


@st.composite
def uploads(draw: st.DrawFn) -> Body:
    """Well-formed requests of every endpoint that takes pictures, with pictures that are not."""
    path = _any(draw, EDITS, EDITS, FILES, JOBS, INFERENCE)
    data = draw(pictures())
    if path == FILES:
        return Body(path, _TYPES[0], form_body({"purpose": b"vision"}, {"file": data}))
    mask = draw(st.none() | pictures())
    if path == EDITS and draw(st.booleans()):
        files = {"image": data} | ({} if mask is None else {"mask": mask})
        return Body(path, _TYPES[0], form_body({"prompt": b"x", "steps": b"2"}, files))
    if path == INFERENCE:
        parameters = {"prompt": "x", "num_inference_steps": 2}
        fields: dict[str, object] = {"inputs": base64.b64encode(data).decode(), "parameters": parameters}
    else:
        fields = {"prompt": "x", "steps": 2, "images": [_inline(data)]}
        fields |= ({"type": "edit"} if path == JOBS else {}) | ({} if mask is None else {"mask": _inline(mask)})
    return Body(path, "application/json", json.dumps(fields).encode())


@st.composite
def chats(draw: st.DrawFn) -> Body:
    """A chat of two tokens whose answer has to fit a hostile schema; some are longer than the model reads."""
    schema = hostile(random.Random(draw(st.integers(0, 2**32))))
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    content = "x" * draw(st.sampled_from((1, 1, 1, 1, 1, 30_000, 500_000)))
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "seed": 1, "response_format": form}
    if len(content) > 1 and draw(st.booleans()):
        fields["deadline_s"] = 0.001  # it expires in the queue
    return Body(CHAT, "application/json", json.dumps(fields).encode())


bodies: st.SearchStrategy[Body] = forms() | uploads()


def every(count: int, number: int, send: Callable[[Body], None]) -> None:
    """Call `send` with so many bodies of this seed. Nothing is shrunk: `send` collects what it finds."""
    for first in range(0, count, _ROUND):
        quiet = settings(
            max_examples=min(_ROUND, count - first), database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        run: Callable[[], None] = seed(f"{number} {first}")(quiet(given(bodies | chats())(send)))
        run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.uploads", description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    statuses: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as folder, site(Path(folder), texts=True) as running:

        def send(body: Body) -> None:
            try:
                answer = body.send(running.client)
            except httpx2.TransportError as error:
                faults.append(f"no answer ({error}): {body!r}")
                return
            statuses[f"{body.path} {answer.status_code}"] += 1
            if (wrong := fault(answer)) is not None:
                faults.append(f"{wrong}: {body!r}")

        with Monitor(running.url, running.child.pid) as monitor:
            every(options.bodies, options.seed, send)
        (owner,) = [key.id for key in Keyring.of(running.settings).all()]
        left = left_by(running.worker.redis, owner)
        if left.largest_bytes > RECORD_BYTES or left.uncounted_bytes:
            faults.append(f"the key has left {left} in Redis")
    report = {
        "bodies": statuses.total(), "seed": options.seed, "statuses": dict(sorted(statuses.items())),
        "faults": len(faults), "healthz_ms": monitor.healthz_ms(), "peak_mib": round(monitor.peak_mib()),
        "largest_record_bytes": left.largest_bytes,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    for one in faults[:50]:
        print(f"wrong: {one}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
