"""`make results`: measures all that docs/results.md tells, one thing after the other, and fills the page in.

Knows commands and their order; each measures by itself, and keeps what it found in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_EVERY = 25  # of the captions calibrate
_WHOLE = ("fp32", "fp32-seeds2", "fp32-seeds3", "int8", "int8-auto")  # drawn with all captions
_SWEPT = 32  # every so many captions are drawn in all ways


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with emoji/captions.tsv and emoji/images.zip"
    )
    parser.add_argument("--work", type=Path, default=_ROOT / "build" / "results", help="for what is made on the way")
    parser.add_argument("--skip", nargs="*", default=[], choices=("quality", "ladder", "arrivals", "peers"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if "quality" not in options.skip:
        quality(options.data, options.work)
    for bench, more in (("ladder", []), ("arrivals", ["--deepcache", "auto"]), ("peers", [])):
        if bench not in options.skip:
            _run("-m", "cli", "bench", bench, *more)
    _run("-m", "benchmarks.figures")


def quality(data: Path, work: Path) -> None:
    """Draw every caption in a few ways and some captions in every way, and score them; resumes."""
    from pipeline.load import load
    from pipeline.prompts import read
    from pipeline.quantized import watch
    from unet_opt.calibrate import CalibrationSettings

    captions = [prompt.text for prompt in read(data / "emoji" / "captions.tsv", columns=("name",), names=())]
    if not (work / "real").is_dir():
        _run("-m", "training.real", "--data", str(data), "--out", str(work / "real"))
    shipped = CalibrationSettings(guidance=5.0)  # as the scales in models/emoji-xl were made: 5 suits the model
    model = load(str(_ROOT / "models" / "emoji-xl"))
    watch(model, captions[::_EVERY], work / "statistics.safetensors", settings=shipped)
    for name, asked, only in (("quality", captions, ("--only", *_WHOLE)), ("sweep", captions[::_SWEPT], ())):
        folder = work / name
        folder.mkdir(exist_ok=True)
        (folder / "captions.json").write_text(json.dumps(asked), "utf-8")
        shared = ("--captions", str(folder / "captions.json"), "--out", str(folder / "drawn"))
        more = ("--work", str(folder / "pixels"), "--statistics", str(work / "statistics.safetensors"))
        _run("-m", "evaluation.variants", "draw", *shared, *more, *only)
        found = _run("-m", "evaluation.variants", "score", *shared, "--real", str(work / "real"))
        (_ROOT / "benchmarks" / "results" / f"{name}.json").write_text(found, "utf-8")


def _run(*arguments: str) -> str:
    """Run Python with these arguments, and return what it writes to stdout. Ends this program where it fails."""
    done = subprocess.run([sys.executable, *arguments], cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"python {' '.join(arguments)}: failed with exit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
