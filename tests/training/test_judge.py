"""The judge gives full marks to right pictures and none to wrong ones, and counts n-grams as by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.world import tiny
from training import captions, judge_pictures, judge_text, phrases, pictures
from training.judge_pictures import SampleSizes
from training.run import TrainingRun
from training.shapes import SMOKE

EXTENT = SampleSizes(captions=40, composed=24, sheet=4)


def painter(run: TrainingRun, change: Callable[[captions.ParsedCaption], captions.ParsedCaption]) -> type:
    """A painter that knows every true picture, and draws what `change` makes of the caption."""
    rows = pictures.read_rows(run.data)
    images = pictures.read_pictures(run.data, rows, run.size)
    index = {row.name.lower(): number for number, row in enumerate(rows)}

    class Fake:
        def __init__(self, *_: object) -> None:
            pass

        def draw(self, texts: list[str]) -> torch.Tensor:
            said = [change(captions.read_caption(text)) for text in texts]
            colours = torch.tensor([captions.COLOURS[one.colour] for one in said]) / 255
            return pictures.composite(images[[index.get(one.subject, 0) for one in said]], colours)

        def codec_psnr(self, _: torch.Tensor) -> float:
            return math.inf  # it draws true pictures, through no codec

    return Fake


def test_true_pictures_get_full_marks(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_pictures, "PictureGenerator", painter(run, lambda said: said))
    figures = judge_pictures.judge_xl(run, EXTENT)
    assert figures["nearest_neighbour_has_the_name"] == 1
    assert figures["background_is_nearest_of_16_colours"] == 1
    assert figures["background_mean_error_of_255"] < 1
    assert figures["held_out_tone_right"] == 1
    for name in ("asked", "composed", "tones", "sheet"):
        assert (run.work / "judge" / f"{name}.png").stat().st_size > 1000


def test_wrong_subjects_backgrounds_and_tones_get_none(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(said: captions.ParsedCaption) -> captions.ParsedCaption:
        colour = "white" if said.colour == "white" else "black" if said.colour != "black" else "pink"
        base, tone = captions.split_tone(said.subject)
        if tone:  # the right base in another tone
            return captions.ParsedCaption(f"{base}: {'dark' if tone != 'dark' else 'light'} skin tone", colour)
        return captions.ParsedCaption("red circle" if base != "red circle" else "nose", colour)

    monkeypatch.setattr(judge_pictures, "PictureGenerator", painter(run, wrong))
    figures = judge_pictures.judge_xl(run, EXTENT)
    rows = pictures.read_rows(run.data)
    toned = sum(captions.has_tone(row.name) for row in rows) / len(rows)
    assert figures["nearest_neighbour_has_the_name"] == pytest.approx(toned, abs=0.2)  # tone aside, as asked
    assert figures["background_is_nearest_of_16_colours"] < 0.2  # white stays white
    assert figures["held_out_tone_right"] == 0


def test_ranks_and_borders() -> None:
    seen, read = torch.eye(3), torch.tensor([[1.0, 0, 0], [0, 0.5, 0.6], [0, 0.9, 0.1]])
    assert judge_pictures._ranks(seen, read, [0, 1, 2]).tolist() == [0, 1, 1]
    pixels = torch.zeros(1, 3, 32, 32)
    pixels[:, 1, 4:28, 4:28] = 1
    pixels[:, 2] = 0.5
    assert judge_pictures.border(pixels).tolist() == [[0, 0, 0.5]]


def test_ngrams_are_counted_as_by_hand() -> None:
    train = [[0, 1, 2], [0, 1, 3]]
    unigram = judge_text.ngram_perplexity(train, [[0, 1, 2]], 5, (0, 0, 1))
    assert unigram == pytest.approx(math.exp(-(math.log(3 / 9) + math.log(2 / 9)) / 2))
    trigram = judge_text.ngram_perplexity(train, [[0, 1, 2]], 5, (0.6, 0.3, 0.1))
    first, second = 0.9 + 0.1 * 3 / 9, 0.45 + 0.1 * 2 / 9
    assert trigram == pytest.approx(math.exp(-(math.log(first) + math.log(second)) / 2))
    # An unseen context leaves its weight to the shorter one.
    assert judge_text.ngram_perplexity(train, [[0, 4, 4]], 5, (0.6, 0.3, 0.1)) == pytest.approx(
        math.exp(-(math.log(0.1 * 1 / 9) + math.log(1 / 9)) / 2)
    )


def test_held_out_chats_are_new_prompts(data: Path, tmp_path: Path) -> None:
    run = dataclasses.replace(tiny(data, tmp_path), seed=3, shapes=dataclasses.replace(SMOKE, chats=200))
    found = judge_text.held_out_chats(run, 30)
    import random

    expander, draw = phrases.Expander(pictures.read_rows(data)), random.Random(3)
    known = {expander.draw(draw).prompt for _ in range(200)}
    assert len({chat.prompt for chat in found}) == len(found) > 20
    assert not known & {chat.prompt for chat in found}
