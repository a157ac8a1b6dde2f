"""Tests that docs/operations.md contains every setting with its default."""

from __future__ import annotations

import re

from core.config import Settings
from tests.faults.parts import ROOT


def shown(default: object) -> str:
    if default is None or default == "":
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_every_setting_stands_in_the_page_with_its_default() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = dict(re.findall(r"^\| `(DIPTYCH_\w+)` \| (\S.*?) \|", page, re.MULTILINE))
    assert rows == {f"DIPTYCH_{name.upper()}": shown(field.default) for name, field in Settings.model_fields.items()}
