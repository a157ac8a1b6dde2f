"""Held-out captions: none of them is trained on, and the embedded model's are of the kinds that the command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation.captions import read
from evaluation.scenes import emoji
from training import captions, tokens
from training.held_out import PHRASINGS, TONES, compose
from training.run import TrainingRun
from training.stream import World

FILE = Path(__file__).parents[2] / "models" / "emoji-xl" / "held-out.tsv"
FEW = {"tones": 3, "coloured": 2, "phrasings": 9, "variants": 3}


def test_tones_come_with_backgrounds_and_wordings_once_for_each_subject(data: Path) -> None:
    rows = emoji.read_rows(data)
    found = compose(rows, **FEW)
    assert found == compose(rows, **FEW) and found != compose(rows, **FEW, seed=1)
    by_file = {row.file: index for index, row in enumerate(rows)}
    hidden = captions.held_out(rows, 3)
    toned, words = found[:9], found[9:]
    assert {by_file[one.file] for one in toned} == hidden
    assert [captions.read_caption(one.caption).colour == "white" for one in toned] == [True, False, False] * 3
    assert not hidden & {by_file[one.file] for one in words} and len(words) == 9
    bases = [captions.split_tone(rows[by_file[one.file]].name)[0] for one in words]
    assert len(set(bases)) == 9 and len({one.id for one in found}) == 18
    with pytest.raises(ValueError, match="of 900 wordings are new"):
        compose(rows, **FEW | {"phrasings": 900})


def test_no_wording_is_one_that_training_draws(worded: TrainingRun) -> None:
    """Token by token, as the trained text towers read them."""
    run = worded
    rows = emoji.read_rows(run.data)
    reader = tokens.clip_tokenizer(run)
    drawn = [
        one if colour is None else captions.with_background(one, colour)
        for wordings in World.read(run).wordings
        for one in wordings
        for colour in (None, *captions.COLOURS)
    ]
    table = {tuple(ids.tolist()) for ids in tokens.encode(reader, drawn)}
    found = compose(rows, **FEW)[9:]
    for ids in tokens.encode(reader, [one.caption for one in found]):
        assert tuple(ids.tolist()) not in table
    assert tuple(tokens.encode(reader, [f"  {rows[0].name.upper()}"])[0].tolist()) in table, "case would tell nothing"


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
