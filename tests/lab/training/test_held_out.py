"""The embedded model's held-out captions have tones with backgrounds, and one wording for each other subject."""

from __future__ import annotations

from pathlib import Path

from evaluation.captions import read
from lab.training import captions

FILE = Path(__file__).parents[3] / "models" / "emoji-xl" / "held-out.tsv"
TONES, PHRASINGS = 48, 272


def test_the_committed_file_has_tones_with_backgrounds_and_one_wording_for_each_subject() -> None:
    kept = read(FILE)
    kinds, backgrounds = zip(
        *((one.id.partition("-")[0], "background" in one.text.split()) for one in kept), strict=True
    )
    assert list(kinds) == ["tone"] * 5 * TONES + ["words"] * PHRASINGS
    assert list(backgrounds[: 5 * TONES]) == [False, True, True, True, True] * TONES
    assert len({captions.split_tone(one.text.partition(" on a")[0]) for one in kept[: 5 * TONES]}) == TONES
    assert len({" ".join(one.text.lower().split()) for one in kept}) == len(kept)
    assert all(captions.read_caption(one.text).colour in captions.COLOURS for one in kept)
