"""Measures every configuration of the embedded model, for docs/quality.md: score, FID, pairs, composition, speed.

    bash lab/training/ways.sh DATA

runs all of it: captions and true pictures by the training, then this module's `draw`, which draws the captions in every
configuration and compares the runs with fp32's, the training's judge, and `collect`, which stores what they found.
Each part goes on where it was stopped.
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

from lab.bench.harness import provenance, record

WHOLE = (
    *(part for part in provenance.WORKER if part != "llm"), *provenance.EMOJI_XL, "evaluation",
    "models/emoji-xl-turbo", "models/emoji-clip", "lab/scenes", "lab/training/scene_prompts.py",
)  # fmt: skip
GROUPS = ("colour_held_out", "count_held_out", "pair_held_out")  # of captions, whose families come in turns


class Configuration(NamedTuple):
    """A configuration of the model: its run's name, a description, and options of `diptych evaluate`. `paired`: fp32
    draws the same from the same noise.
    """

    name: str
    description: str
    options: tuple[str, ...]
    paired: bool = True


CONFIGURATIONS = (
    Configuration("fp32", "full plan", ("--precision", "fp32")),
    Configuration("int8", "full plan", ("--precision", "int8")),
    Configuration(
        "int8-seeds", "full plan, other seeds", ("--precision", "int8", "--seed-offset", "1000000"), paired=False
    ),
    Configuration("int8-tiny", "tiny decoder", ("--precision", "int8", "--vae", "tiny")),
    Configuration("int8-auto", "DeepCache `auto`", ("--precision", "int8", "--deepcache", "auto")),
    Configuration("int8-half", "DeepCache as MLPerf's", ("--precision", "int8", "--deepcache", "2:resnet")),
    Configuration("int8-block2", "DeepCache `2`", ("--precision", "int8", "--deepcache", "2")),
    Configuration("int8-best", "plan `best`", ("--precision", "int8", "--plan", "best")),
    Configuration("int8-balanced", "plan `balanced`", ("--precision", "int8", "--plan", "balanced")),
    Configuration("int8-fast", "plan `fast`", ("--precision", "int8", "--plan", "fast")),
    Configuration("turbo", "emoji-xl-turbo, 4 steps", ("--model", "models/emoji-xl-turbo"), paired=False),
)
_BASE, _AGAIN = "fp32", "int8"  # what others are compared with, and the run whose captions are drawn twice


def draw(work: Path, threads: int | None) -> None:
    """Draw `work`/unseen.tsv in every configuration that is not done, and compare the runs.

    Raises `subprocess.CalledProcessError`.
    """
    runs = [work / "runs" / configuration.name for configuration in CONFIGURATIONS]
    for configuration, run in zip(CONFIGURATIONS, runs, strict=True):
        if not (run / "scores.json").is_file():
            run.parent.mkdir(parents=True, exist_ok=True)
            # The machine's load before, which speed depends on.
            run.with_suffix(".load").write_text(f"{os.getloadavg()[0]:.2f}", "utf-8")
            words = ["--lens", "emoji-clip", "--prompts", str(work / "unseen.tsv"), "--out", str(run)]
            _evaluate(*words, *configuration.options, *([] if threads is None else ["--threads", str(threads)]))
    _evaluate("compare", *map(str, runs), "--real", str(work / "real" / "other"), "--out", str(work / "compared"))


def collected(work: Path) -> dict[str, Any]:
    """The results of the parts: comparisons, and judgements, `work`/runs/NAME/scenes.json.

    Raises `record.BenchError` for a judgement that is missing or was stopped.
    """
    report = json.loads((work / "compared" / "report.json").read_text("utf-8"))
    runs = {run["name"]: run for run in report["runs"]}
    judged = {configuration.name: _judgement(work, configuration.name) for configuration in CONFIGURATIONS}
    base, configurations = _right(judged[_BASE]), {}
    for name, description, options, paired in CONFIGURATIONS:
        run, pairs = runs[name], runs[name].get("pairs", {}) if paired else {}
        configurations[name] = {
            "told": description, "options": " ".join(options),
            "load": float((work / "runs" / f"{name}.load").read_text("utf-8")),
            "images_per_s": run["pictures_per_second"], "scores": run["scores"], "ratios": run.get("ratios", {}),
            "pairs": {metric: {end: pair[end] for end in ("value", "low", "high")} for metric, pair in pairs.items()},
            "gates": run.get("gates", []),
            "composition": {
                group: {key: share for key, share in shares.items() if key not in ("right", "two_seeds", "two_true")}
                for group, shares in judged[name].items() if isinstance(shares, dict)
            },
            "right_less_base": compared(_right(judged[name]), base),
        }  # fmt: skip
    captions = json.loads((work / "runs" / _BASE / "captions.json").read_text("utf-8"))[:8]
    two = judged[_AGAIN]
    return {
        "captions": report["captions"], "judged": two["prompts"] * len(GROUPS), "ways": configurations,
        "halves_fid": float((work / "halves.txt").read_text("utf-8").split()[-1]), "lens": report["lens"],
        "two_seeds": {group: [two[group]["two_seeds"], two[group]["two_true"]] for group in two if group in GROUPS},
        "shown": [text for _, text in captions],
    }  # fmt: skip


def _judgement(work: Path, name: str) -> dict[str, Any]:
    path = work / "runs" / name / "scenes.json"
    judged: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if missing := [group for group in GROUPS if group not in judged]:
        raise record.BenchError(f"{path}: has no {missing[0]}; judge the run again")
    return judged


def _right(judged: dict[str, Any]) -> list[bool]:
    """Return whether all is right, by prompt."""
    return [right for group in GROUPS for right in judged[group]["right"]]


def compared(right: Sequence[bool], base: Sequence[bool]) -> dict[str, Any]:
    """The number of prompts that a configuration draws right where the base's picture is wrong, and vice versa."""
    gained = sum(a and not b for a, b in zip(right, base, strict=True))
    lost = sum(b and not a for a, b in zip(right, base, strict=True))
    return {"right": sum(right), "of": len(right), "gained": gained, "lost": lost}


def _evaluate(*words: str) -> None:
    """Run `diptych evaluate` of this tree."""
    record.progress(f"diptych evaluate {' '.join(words)}")
    environment = os.environ | {"PYTHONPATH": str(provenance.ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "cli", "evaluate", *words]
    subprocess.run(command, cwd=provenance.ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.ways", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("draw", "collect", "names"))
    parser.add_argument("--work", type=Path, default=provenance.ROOT / "build" / "ways", metavar="DIR")
    parser.add_argument("--threads", type=int, metavar="N", help="that draw; default: one for each core")
    options = parser.parse_args(arguments)
    try:
        if options.part == "names":
            print(*(configuration.name for configuration in CONFIGURATIONS), sep="\n")
        elif options.part == "draw":
            draw(options.work.resolve(), options.threads)
        else:
            record.publish("ways", collected(options.work.resolve()), artifacts=WHOLE)
    except (record.BenchError, subprocess.CalledProcessError) as error:
        record.progress(f"{error}; the same command goes on")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
