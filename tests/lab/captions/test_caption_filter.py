"""What counts as a caption, by the picture model's own tokenizers, and that nothing is kept twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.characters import text_error
from core.config import EMBEDDED_MODEL
from evaluation import captions
from lab.captions import caption_filter
from lab.captions.caption_filter import BROKEN, EMPTY, LONG, UNFINISHED, CaptionFilter
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError

TOKENIZERS = caption_filter.tokenizers(str(EMBEDDED_MODEL))
WORDS = st.lists(st.sampled_from(["fox", "Fox", "FOX", "a", "f", "ox", "ß", "SS", "é", "🦊"]), min_size=1, max_size=4)
SPACES = st.sampled_from([" ", "  ", "\t", "\n", "\u00a0", "\u2028", ""])
ANSWERS = st.one_of(st.text(max_size=90), st.builds(lambda words, space: space.join(words), WORDS, SPACES))


@given(st.lists(ANSWERS, max_size=30))
def test_what_is_kept_is_distinct_and_can_be_drawn(answers: list[str]) -> None:
    sieve, kept = CaptionFilter(TOKENIZERS), list[str]()
    for text in answers:
        if sieve.wrong(text, complete=True) is None and not sieve.has(caption_filter.squeeze(text)):
            sieve.keep(caption_filter.squeeze(text))
            kept.append(caption_filter.squeeze(text))
    assert len({"".join(text.split()).casefold() for text in kept}) == len(kept)
    for text in kept:
        assert text_error(text, 10_000) is None and text == " ".join(text.split())
        for tokenizer in TOKENIZERS:
            cut = tokenizer(text, truncation=True, max_length=77).input_ids
            assert tokenizer.decode(cut) == tokenizer.decode(tokenizer(text).input_ids)
        captions.render(("id", "caption"), [("1", text)])


@given(ANSWERS, SPACES)
def test_case_and_spaces_make_no_other_caption(text: str, space: str) -> None:
    sieve = CaptionFilter(TOKENIZERS)
    sieve.keep(text)
    assert sieve.has(text) and sieve.has(f"{space}{text}{space}") and sieve.has(text.replace(" ", space))
    assert sieve.has(text.upper().lower()) or text.casefold() != text.upper().lower().casefold()
    assert not sieve.has(text + "x")


@pytest.mark.parametrize(
    ("text", "whole", "wrong"),
    [
        ("red heart on a teal background", True, None),
        (' "A fox\n in snow." ', True, None),
        ("red heart on a", False, UNFINISHED),
        ("", True, EMPTY),
        (' "!" … ', True, EMPTY),
        ("a\x1cfox", True, BROKEN),
        ("\ufffdcurving up", True, BROKEN),
        (" ".join(["red"] * 75), True, None),
        (" ".join(["red"] * 76), True, LONG),
    ],
)
def test_what_is_wrong_is_said(text: str, whole: bool, wrong: str | None) -> None:
    assert CaptionFilter(TOKENIZERS).wrong(text, whole) == wrong
    assert caption_filter.squeeze(" “A fox\n\tin  snow.” ") == "A fox in snow."


def test_tokenizers_of_any_picture_model() -> None:
    assert CaptionFilter(caption_filter.tokenizers(tiny.TINY)).tokens("fox") == 5
    assert CaptionFilter(TOKENIZERS).tokens("red heart") == 4
    for name, said in (
        (str(EMBEDDED_MODEL.parent / "emoji-lm"), "the part tokenizer is missing"),
        ("gone", "gone: no such folder"),
        ("owner/gone", "owner/gone: cannot be downloaded"),
    ):
        with pytest.raises(ModelError, match=said):
            caption_filter.tokenizers(name)


def test_half_a_tokenizer_is_none(tmp_path: Path) -> None:
    """The library would make one of it that knows no words."""
    for part in ("tokenizer", "tokenizer_2"):
        shutil.copytree(EMBEDDED_MODEL / part, tmp_path / part)
    for name in ("vocab.json", "tokenizer.json"):
        (tmp_path / "tokenizer_2" / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match=r"tokenizer_2: vocab\.json is missing"):
        caption_filter.tokenizers(str(tmp_path))
