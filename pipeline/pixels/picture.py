"""A finished image and its PNG file, with parameters and fingerprint but no id or time: equal images give equal
files.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import unicodedata
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.image import ImageParameters
from pipeline.pixels import files
from pipeline.pixels.infotext import infotext
from pipeline.pixels.provenance import EDITED, GENERATED, Provenance, xmp

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The result of an image request. `warnings` are for people, e.g. of a truncated prompt.

    `sampler` is the name of the one that ran, `schedule_type` as for `infotext`. `provenance` marks its files.
    """

    image: Image
    parameters: ImageParameters
    fingerprint: dict[str, Any]
    warnings: tuple[str, ...] = field(default=())
    sampler: str = ""
    schedule_type: str | None = None
    provenance: Provenance | None = None

    def enlarged(self) -> Picture:
        """Return the picture as the filter that it was requested with enlarges it; the same without one."""
        upscale = self.parameters.upscale
        if upscale is None or not upscale.is_filter:
            return self
        from PIL.Image import Resampling

        size = upscale.filtered_size(self.parameters.width, self.parameters.height)
        return replace(self, image=self.image.resize(size, Resampling.LANCZOS))

    @property
    def infotext(self) -> str:
        """Return its parameters as AUTOMATIC1111's web UI writes them."""
        return infotext(self.parameters, self.sampler, self.fingerprint, self.schedule_type)

    @property
    def source_type(self) -> str:
        """IPTC's digital source type."""
        return GENERATED if self.parameters.edit is None else EDITED

    def png(self, *, metadata: bool = True) -> bytes:
        """Return the picture as PNG, with text chunks: `parameters` is its `infotext`, `diptych` the parameters as
        JSON, and `fingerprint` the fingerprint as JSON. Without `metadata` it has none.
        """
        from PIL.PngImagePlugin import PngInfo

        chunks = PngInfo()
        if metadata:
            chunks.add_text("parameters", self.infotext)  # tEXt where it is Latin-1, as their readers are used to
            chunks.add_itxt("diptych", to_json(self.parameters.to_dict()))
            chunks.add_itxt("fingerprint", to_json(self.fingerprint))
        provenance = self.provenance
        if provenance is None:
            return files.png(self.image, chunks)
        chunks.add_itxt("XML:com.adobe.xmp", xmp(self.source_type))
        return provenance.signed(files.png(provenance.watermarked(self.image), chunks), "image/png", self.source_type)

    def write(self, path: Path) -> None:
        """Write the PNG fully or not at all. Raises OSError, and then leaves nothing behind."""
        data = self.png()
        # Short, since `path` may have the maximum length; and random, since others may write the same image.
        partial = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with partial.open("xb") as stream:
                stream.write(data)
            partial.replace(path)
        except BaseException:  # Ctrl-C too
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def file_name(parameters: ImageParameters, name: str = "") -> str:
    """Return the file name of an image: `name` if it has one, words of its prompt, its seed. Below 200 bytes."""
    plain = unicodedata.normalize("NFKD", parameters.prompt[:200]).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:48].rstrip("-") or "picture"
    safe = re.sub(r"[^\w.-]+", "_", name).strip(".").encode()[:96].decode("utf-8", "ignore")
    return "-".join(part for part in (safe, words, str(parameters.seed)) if part) + ".png"


def to_json(value: dict[str, Any]) -> str:
    """Serialize a value for files: equal values give equal texts. Raises ValueError for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)
