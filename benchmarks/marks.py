"""Measures what marks of provenance cost an image: `python -m benchmarks.marks [--pictures 100] [--side 1024]`.

Encodes the same images in each format without marks, with content credentials, and with the watermark too, one after
another; C2PA's library then validates every signed file. Images are smooth colours with noise.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import record
from benchmarks.harness.record import BenchError
from contract.image import ImageParameters
from core.config import Settings
from pipeline.pixels import provenance
from pipeline.pixels.picture import Picture
from workers.formats import ImageFormat, encode

_FORMATS = (ImageFormat("png"), ImageFormat("jpeg", 90), ImageFormat("webp", 90))
_NOISE = 8.0  # standard deviation, of 255


def pictures(count: int, side: int) -> Iterator[Picture]:
    from PIL.Image import Resampling, fromarray

    for seed in range(count):
        chance = np.random.default_rng(seed)
        smooth = fromarray(chance.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize(
            (side, side), Resampling.BICUBIC
        )
        pixels = np.clip(np.asarray(smooth) + chance.normal(0, _NOISE, (side, side, 3)), 0, 255).astype(np.uint8)
        yield Picture(fromarray(pixels), ImageParameters("a small red boat", seed, side, side), {"model": "none"})


def valid(data: bytes, media_type: str) -> bool:
    import c2pa

    with c2pa.Reader(media_type, io.BytesIO(data)) as reader:
        return bool(json.loads(reader.json())["validation_state"] == "Valid")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Raises `BenchError` for a file that is not valid."""
    with tempfile.TemporaryDirectory(prefix="diptych-marks-") as folder, record.alone():
        marks = {
            kind: provenance.of(Settings(provenance=kind, data_dir=Path(folder)))
            for kind in ("off", "c2pa", "c2pa+watermark")
        }
        seconds: dict[tuple[str, str], list[float]] = {}
        sizes: dict[tuple[str, str], list[int]] = {}
        for picture in pictures(options.pictures, options.side):
            for form in _FORMATS:
                for kind, mark in marks.items():
                    started = time.perf_counter()
                    data = encode(picture, form, provenance=mark)
                    seconds.setdefault((form.name, kind), []).append(time.perf_counter() - started)
                    sizes.setdefault((form.name, kind), []).append(len(data))
                    if mark is not None and not valid(data, form.media_type):
                        raise BenchError(f"{form.name}, {kind}: a signed file is not valid")
    formats = {
        form.name: {
            kind: {
                "ms": round(1e3 * statistics.median(seconds[form.name, kind]), 2),
                "bytes": round(statistics.median(sizes[form.name, kind])),
            }
            for kind in marks
        }
        for form in _FORMATS
    }
    result = {"pictures": options.pictures, "side": options.side, "valid": 2 * len(_FORMATS) * options.pictures}
    return record.publish("marks", {**result, "formats": formats}, options.results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.marks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--side", type=int, default=1024, help="of a picture, in pixels; default: %(default)s")
    parser.add_argument(
        "--results", "--out", type=Path, default=record.RESULTS, metavar="DIR", help="where the JSON goes"
    )
    result = run(parser.parse_args(arguments))
    rows = [
        (form, kind, figures["ms"], figures["bytes"])
        for form, kinds in result["formats"].items() for kind, figures in kinds.items()
    ]  # fmt: skip
    record.table(f"{result['pictures']} pictures, {result['side']}²", ("format", "marks", "ms", "bytes"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
