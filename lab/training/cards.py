"""Writes the model cards: `model_cards/NAME.md` with parameters, lengths of training and measured figures filled in.

Every figure comes from the curves' or the judge's files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path

from lab.training.run import TrainingRun

DATA = """\
Pictures: Noto Emoji, Copyright Google, Apache License 2.0. Names and keywords: Unicode CLDR, Copyright
Unicode, Inc., Unicode License v3 (Unicode-DFS-2016)."""
_COCO = """\
General wording: 5,000 captions of COCO 2014 (CC BY 4.0, COCO Consortium; the list is MLCommons', Apache
License 2.0); every twentieth is held out."""
_TEXTS = Path(__file__).with_name("model_cards")
_FIELD = re.compile(r"\{(\w+)(?: (\S+))?\}")


def write(folder: Path, run: TrainingRun) -> None:
    """Write `README.md` into an exported model's folder."""
    values: dict[str, Callable[[str], str]] = {
        "parameters": lambda _: _parameters(folder),
        "data": lambda _: DATA,
        "coco": lambda _: _COCO,
        "trained": lambda stage: _trained(stage, run),
        "size": lambda _: str(run.size),
        "block": lambda _: str(run.shapes.draft_block),
        "seed": lambda _: str(run.seed),
        "measured": lambda _: _measured(folder.name, run),
    }
    text = (_TEXTS / f"{folder.name}.md").read_text(encoding="utf-8")
    filled = _FIELD.sub(lambda field: values[field[1]](field[2] or ""), text)
    (folder / "README.md").write_text(filled, encoding="utf-8")


def _parameters(folder: Path) -> str:
    from safetensors import safe_open

    counts: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.safetensors")):
        part = path.parent.relative_to(folder).as_posix() if path.parent != folder else "model"
        with safe_open(path, framework="pt") as weights:
            counts[part] += sum(prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
    return table([["part", "parameters"], *([part, f"{count:,}"] for part, count in counts.items())])


def _trained(stage: str, run: TrainingRun) -> str:
    """A line of a list: how long a stage was trained, and its last loss."""
    path = run.work / stage / "curve.jsonl"
    last = path.read_text(encoding="utf-8").splitlines()[-1:] if path.exists() else []
    if not last:
        return f"- `{stage}`: not trained"
    end = json.loads(last[0])
    begun = ", from weights exported before" if (run.work / "start" / f"{stage}.pt").exists() else ""
    length = f"{end['iteration']:,} iterations in {end['minutes']:.0f} minutes"
    return f"- `{stage}`: {length}{begun}, last loss {end['smooth']:.4g}"


def _measured(name: str, run: TrainingRun) -> str:
    """The judge's figures of a model, or which command measures it."""
    path = run.work / "judge" / "figures.json"
    figures = json.loads(path.read_text(encoding="utf-8")).get(name) if path.exists() else None
    command = f"lab.training.judge --only {name}"
    if not figures:
        return f"Not measured yet: `python -m {command}`."
    rows = [[key.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)]
            for key, value in figures.items()]  # fmt: skip
    note = f"By `python -m {command}` when the model was made; no commit is recorded."
    return f"{note}\n\n{table([['figure', 'value'], *rows])}"


def table(rows: list[list[str]]) -> str:
    """Rows of cells as Markdown; the first is the head."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))
