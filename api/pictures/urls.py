"""Reads pictures that JSON has as text: data URLs, https URLs, and base64 alone.

Decodes no base64 and fetches nothing by itself: decoder.py reads the bytes in the tenant's turn, and
fetcher.py fetches, after the rate limit and the quota.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator
from functools import partial
from urllib.parse import unquote_to_bytes

from api.errors import invalid_field
from api.pictures.uploads import PictureSource
from contract import urls

NOT_BASE64 = "is not in base64: it must be letters, digits, + and / (or - and _)"
MAX_URL = 8192  # characters of one that is fetched; signed ones are long
_DATA = re.compile(r"\s*data:([^,]{0,200}),", re.IGNORECASE)
_TYPES = re.compile(r"(image/(x-)?png|image/p?jpe?g|image/webp|image/\*|application/octet-stream)?", re.IGNORECASE)
_ACCEPTED = "an https:// URL or a data: URL of a PNG, JPEG or WebP in base64"
_SPACE = b" \t\n\r\v\f"
_PART = 2**18  # characters of base64 that are decoded at once; a multiple of 4
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def picture_of(field: str, text: str, *, param: str = "", bare: bool = False) -> PictureSource:
    """The picture that a client's text stands for: a data URL, an https URL, or where it may be `bare` base64 alone.

    `field` names it in later errors. Raises `ApiError` (400) naming `param`, by default the field.
    """
    param = param or field
    if (head := _DATA.match(text)) is not None:
        media_type, *parameters = (part.strip() for part in head[1].split(";"))
        if not _TYPES.fullmatch(media_type):
            raise invalid_field(param, "is a data: URL of another media type than image/png, image/jpeg or image/webp")
        if "base64" not in (parameter.lower() for parameter in parameters):
            raise invalid_field(param, "is a data: URL that is not in base64: it must have ;base64 before its comma")
        return _inline(field, param, text, head.end())
    if "://" not in text[:MAX_URL]:
        if bare:
            return _inline(field, param, text, 0)
        raise invalid_field(param, f"must be {_ACCEPTED}")
    if len(text) > MAX_URL:
        raise invalid_field(param, f"must be at most {MAX_URL} characters where it is an https:// URL")
    if not text.strip().lower().startswith("https://"):
        raise invalid_field(param, f"must be {_ACCEPTED}; other addresses are not fetched")
    url = text.strip().partition("#")[0]
    try:
        urls.parse(url, ("https",))
    except ValueError as error:
        raise invalid_field(param, str(error)) from None
    # The address identifies it, so that a repeated request needs not be fetched to be known.
    return PictureSource(field, 0, bytes, hashlib.sha256(url.encode()).hexdigest(), url=url)


def decoded(param: str, message: str, text: bytes) -> Iterator[bytes]:
    """Yield the bytes of a base64 text in parts: of either alphabet, with line ends or not, with its padding or not.

    Each part is decoded in calls of its own, between which other threads run. Raises `ApiError` (400) with this
    message.
    """
    if b"%" in text:
        text = b"".join(_unquoted(text))
    text = b"".join(text[at : at + _PART].translate(_URL_SAFE, _SPACE) for at in range(0, len(text), _PART))
    if len(text) % 4:
        text = text.rstrip(b"=")
        text += b"=" * (-len(text) % 4)
    try:
        if 0 <= text.find(b"=") < len(text) - 2:
            raise ValueError("its padding is not at its end")
        for at in range(0, len(text), _PART):
            yield base64.b64decode(text[at : at + _PART], validate=True)
    except (binascii.Error, ValueError):
        raise invalid_field(param, message) from None


def _unquoted(text: bytes) -> Iterator[bytes]:
    """Yield the bytes of a percent-encoded text in parts, none of which ends within an escape: each `%` of a part is
    two objects meanwhile.
    """
    at = 0
    while at < len(text):
        end = at + _PART
        if (escape := text.find(b"%", end - 2, end)) >= 0:
            end = escape
        yield unquote_to_bytes(text[at:end])
        at = end


def _inline(field: str, param: str, text: str, start: int) -> PictureSource:
    read = partial(_decode_from, param, text, start)
    return PictureSource(field, (3 * (len(text) - start) + 3) // 4, read)


def _decode_from(param: str, text: str, start: int) -> bytes:
    return b"".join(decoded(param, NOT_BASE64, text[start:].encode("ascii", "replace")))
