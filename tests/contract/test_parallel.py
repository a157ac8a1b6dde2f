"""The setting of several GPUs."""

from __future__ import annotations

import pytest

from contract.parallel import Parallel, parse
from core.config import Settings


@pytest.mark.parametrize(
    ("text", "split"),
    [("", Parallel()), ("tp2", Parallel(2)), ("pp4", Parallel(1, 4)), ("tp8pp2", Parallel(8, 2)), ("tp1", Parallel())],
)
def test_what_is_a_split(text: str, split: Parallel) -> None:
    assert parse(text) == split
    assert parse(str(split).replace("off", "")) == split


@pytest.mark.parametrize("text", ["tp3", "tp", "pp0", "pp17", "2", "pp2tp2", "tp2 ", "tp٢", "tp16"])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be such as tp2, pp4 or tp2pp2"):
        parse(text)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"text_parallel": "tp2", "text_models": "one,two"}, "DIPTYCH_TEXT_MODELS names several"),
        ({"text_parallel": "pp2", "text_draft": "a/b"}, "DIPTYCH_TEXT_DRAFT is lookup"),
        ({"text_parallel": "tp5"}, "must be such as"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)text_parallel.*{reason}"):
        Settings(**settings)  # type: ignore[arg-type]
