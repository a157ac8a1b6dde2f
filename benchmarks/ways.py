"""Measures every way to draw with the embedded model, for docs/quality.md: score, FID, pairs, composition, speed.

    python -m benchmarks.ways --data DATA

Draws the same captions of families that training never saw in every way, compares the runs with fp32's, judges what
they show, and makes the strip of pictures. Each part is a command of its own that goes on where it was stopped, so this
one does too; `--work` keeps their output. 450 captions, 300 of them judged, take some 40 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import provenance, record

ROOMS = (
    *provenance.IMAGES, "evaluation", "models/emoji-xl-turbo", "models/emoji-clip", "training/scene_prompts.py",
)  # fmt: skip
_KINDS = 3  # of held-out families, whose captions come in turns


class Way(NamedTuple):
    """A way to draw: its run's name, what it is in words, and options of `diptych evaluate`. `paired`: fp32 draws the
    same from the same noise.
    """

    name: str
    told: str
    words: tuple[str, ...]
    paired: bool = True


WAYS = (
    Way("fp32", "full plan", ("--precision", "fp32")),
    Way("int8", "full plan", ("--precision", "int8")),
    Way("int8-seeds", "full plan, other seeds", ("--precision", "int8", "--seed-offset", "1000000"), paired=False),
    Way("int8-tiny", "tiny decoder", ("--precision", "int8", "--vae", "tiny")),
    Way("int8-auto", "DeepCache `auto`", ("--precision", "int8", "--deepcache", "auto")),
    Way("int8-half", "DeepCache as MLPerf's", ("--precision", "int8", "--deepcache", "2:resnet")),
    Way("int8-block2", "DeepCache `2`", ("--precision", "int8", "--deepcache", "2")),
    Way("int8-best", "plan `best`", ("--precision", "int8", "--plan", "best")),
    Way("int8-balanced", "plan `balanced`", ("--precision", "int8", "--plan", "balanced")),
    Way("int8-fast", "plan `fast`", ("--precision", "int8", "--plan", "fast")),
    Way("turbo", "emoji-xl-turbo, 4 steps", ("--model", "models/emoji-xl-turbo"), paired=False),
)
_BASE, _AGAIN = "fp32", ("int8", "int8-seeds")


def measure(data: Path, work: Path, captions: int, judged: int, threads: int | None) -> dict[str, Any]:
    """Run all parts that are not done, and collect what they found. Raises `subprocess.CalledProcessError`.

    `threads` draw; None: as many as there are cores.
    """
    prompts, real = work / "unseen.tsv", work / "real"
    # One thread: arrays of 128 pixels are too small for two, which would wait for each other most of the time.
    training = ["--data", str(data), "--work", str(work / "prompts-work"), "--variants", "24", "--threads", "1"]
    if not prompts.is_file():
        words = ["--unseen", "--count", str(captions // _KINDS), "--out", str(prompts), "--real", str(real)]
        said = _run("training.scene_prompts", [*training, *words])
        (work / "halves.txt").write_text(said.splitlines()[-1].rpartition(" ")[2], "utf-8")
    runs = {way.name: work / "runs" / way.name for way in WAYS}
    loads = {way.name: _drawn(way, prompts, runs[way.name], threads) for way in WAYS}
    compared = work / "compared"
    folders = [str(folder) for folder in runs.values()]
    _run("cli", ["evaluate", "compare", *folders, "--real", str(real / "other"), "--out", str(compared)])
    _judge(data, work, runs, judged // _KINDS)
    _run("training.sheet", [*folders, str(provenance.ROOT / "docs" / "quality.png")])
    return _collected(work, compared, loads)


def _drawn(way: Way, prompts: Path, out: Path, threads: int | None) -> float:
    """Draw one way; returns the machine's load before it, which its speed depends on."""
    load = out.with_suffix(".load")
    if not (out / "scores.json").is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        load.write_text(f"{os.getloadavg()[0]:.2f}", "utf-8")
        words = ["--lens", "emoji-clip", "--prompts", str(prompts), "--out", str(out), *way.words]
        words += [] if threads is None else ["--threads", str(threads)]
        _run("cli", ["evaluate", *words])
    return float(load.read_text("utf-8"))


def _judge(data: Path, work: Path, runs: dict[str, Path], count: int) -> None:
    """Judge the runs whose pictures and count have changed."""
    every = {name: _pictures(folder) for name, folder in runs.items()}
    left = [name for name in runs if _judged(work, name).get("pictures") != every[name]]
    left += [name for name in runs if name not in left and _judged(work, name)["prompts"] != count]
    judge = ["evaluate", "scenes", "--data", str(data), "--threads", "1", "--count", str(count)]
    first, other = _AGAIN
    if first in left:
        _run("cli", [*judge, str(runs[first]), "--again", str(runs[other]), "--real", str(work / "real")])
    if rest := [str(runs[name]) for name in left if name != first]:
        _run("cli", [*judge, *rest])


def _judged(work: Path, name: str) -> dict[str, Any]:
    path = work / "runs" / name / "scenes.json"
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    whole = all(kind in found for kind in ("colour_held_out", "count_held_out", "pair_held_out"))
    return found if whole else {}


def _pictures(folder: Path) -> str:
    """The digest of a run's pictures, as `EvaluationRun.digest` makes it."""
    import hashlib

    records = [json.loads(line) for line in (folder / "pictures.jsonl").read_text("utf-8").splitlines()]
    by_index = {one["index"]: one["sha256"] for one in records}
    return hashlib.sha256("".join(by_index[index] for index in sorted(by_index)).encode()).hexdigest()


def _collected(work: Path, compared: Path, loads: dict[str, float]) -> dict[str, Any]:
    report = json.loads((compared / "report.json").read_text("utf-8"))
    runs = {one["name"]: one for one in report["runs"]}
    base = _rights(_judged(work, _BASE))
    found = {}
    for way in WAYS:
        one, judged = runs[way.name], _judged(work, way.name)
        pairs = one.get("pairs", {}) if way.paired else {}
        found[way.name] = {
            "told": way.told, "options": " ".join(way.words), "load": loads[way.name],
            "images_per_s": one["pictures_per_second"], "scores": one["scores"], "ratios": one.get("ratios", {}),
            "pairs": {name: {end: pair[end] for end in ("value", "low", "high")} for name, pair in pairs.items()},
            "gates": one.get("gates", []), "composition": _shares(judged),
            "right_less_base": _changed(_rights(judged), base),
        }  # fmt: skip
    captions = json.loads((work / "runs" / _BASE / "captions.json").read_text("utf-8"))[:8]
    two = _judged(work, _AGAIN[0])
    return {
        "captions": report["captions"], "judged": two["prompts"] * _KINDS, "ways": found,
        "halves_fid": float((work / "halves.txt").read_text("utf-8")), "lens": report["lens"],
        "two_seeds": {kind: [one["two_seeds"], one["two_true"]] for kind, one in two.items() if isinstance(one, dict)},
        "shown": [text for _, text in captions],
    }  # fmt: skip


def _shares(judged: dict[str, Any]) -> dict[str, Any]:
    """By group the shares with their intervals, without what each prompt has."""
    left_out = ("right", "two_seeds", "two_true")
    groups = {kind: one for kind, one in judged.items() if isinstance(one, dict)}
    return {kind: {k: v for k, v in one.items() if k not in left_out} for kind, one in groups.items()}


def _rights(judged: dict[str, Any]) -> list[bool]:
    return [right for one in judged.values() if isinstance(one, dict) for right in one["right"]]


def _changed(ours: Sequence[bool], base: Sequence[bool]) -> dict[str, Any]:
    """How many prompts a way draws right of which the base's picture is wrong, and the other way round."""
    gained = sum(a and not b for a, b in zip(ours, base, strict=True))
    lost = sum(b and not a for a, b in zip(ours, base, strict=True))
    return {"right": sum(ours), "of": len(ours), "gained": gained, "lost": lost}


def _run(module: str, words: Sequence[str]) -> str:
    """A command of this tree; its standard output."""
    print(f"python -m {module} {' '.join(words)}", file=sys.stderr, flush=True)
    environment = os.environ | {"PYTHONPATH": str(provenance.ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, cwd=provenance.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ways", description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="of the training; holds emoji/ and coco/"
    )
    parser.add_argument("--work", type=Path, default=provenance.ROOT / "build" / "ways", metavar="DIR")
    parser.add_argument(
        "--captions", type=int, default=450, metavar="N", help="drawn in each way; default: %(default)s"
    )
    parser.add_argument(
        "--judged", type=int, default=300, metavar="N", help="of them by the checker; default: %(default)s"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="that draw; default: one for each core")
    options = parser.parse_args()
    if not _KINDS * 2 <= options.judged <= options.captions:
        parser.error("--judged: must be at least 6, and at most --captions")
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        found = measure(
            options.data.resolve(), options.work.resolve(), options.captions, options.judged, options.threads
        )
    except subprocess.CalledProcessError as error:
        print(f"a part failed with exit code {error.returncode}; the same command goes on", file=sys.stderr)
        return 1
    record.publish("ways", found, rooms=ROOMS, children=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
