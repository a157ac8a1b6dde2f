"""`plans.json` beside a model: kept for each precision, and refused by name where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline import plans
from pipeline.checkpoints.folder import ModelError

FOUND: dict[str, Any] = {"plans": {"fast": {"steps": 8}}, "prompts": 64}


def test_precisions_have_plans_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / plans.FILE
    with pytest.raises(ModelError, match=r"plans\.fast\.seed"):
        plans.write(path, "int8", {"plans": {"fast": {"seed": 3}}})
    assert plans.read_plans(path, "int8") == {} == plans.of_model(tmp_path, "", "int8", "auto")
    plans.write(path, "int8", FOUND)
    plans.write(path, "fp32", {"plans": {"best": {"deepcache": "off"}}})
    assert plans.read_plans(path, "int8") == {"fast": {"steps": 8}} and plans.read_plans(path, "bf16") == {}
    assert json.loads(path.read_text())["tuned"]["int8"]["prompts"] == 64
    plans.write(path, "int8", {"plans": {}})
    assert plans.read_plans(path, "int8") == {} and plans.read_plans(path, "fp32") == {"best": {"deepcache": "off"}}
    assert [found.name for found in tmp_path.iterdir()] == [plans.FILE]


def test_another_file_may_be_named(tmp_path: Path) -> None:
    plans.write(tmp_path / "mine.json", "int8", FOUND)
    assert plans.of_model(None, str(tmp_path / "mine.json"), "int8", "fast") == {"fast": {"steps": 8}}
    with pytest.raises(ModelError, match="there is no file"):
        plans.of_model(tmp_path, str(tmp_path / "gone.json"), "int8", "")
    with pytest.raises(ModelError, match="plan: must be one of off, auto, fast"):
        plans.of_model(None, str(tmp_path / "mine.json"), "int8", "best")
    with pytest.raises(ModelError, match="plan: must be one of off, auto"):
        plans.of_model(None, "", "int8", "fast")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"version": 1, "tuned": {"int8": []}}',
        '{"version": 1, "tuned": {"int8": {"plans": 3}}}',
        "{}",
        '{"version": 2, "tuned": {}}',
        '{"version": 1, "tuned": {"int8": {"plans": {"fast": {"seed": 1}}}}}',
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / plans.FILE
    path.write_text(text)
    with pytest.raises(ModelError, match=r"plans\.json"):
        plans.read_plans(path, "int8")
