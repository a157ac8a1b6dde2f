"""The judges give full marks to right images and none to wrong ones."""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from evaluation.pixels import Pixels
from evaluation.scenes import emoji
from training import cards, ip_adapter, judge, judge_text, phrases
from training.render import Renderer, images_of
from training.run import TrainingRun
from training.shapes import SMOKE
from training.stream import World

COUNT = 2


def shown(run: TrainingRun) -> dict[str, Pixels]:
    """True images of captions."""
    world = World.read(run)
    found = world.composer.prompts("colour", COUNT, size=(run.size, run.size))
    images = images_of(Renderer(world.images), [prompt.scene for prompt in found])
    return dict(zip((prompt.caption for prompt in found), map(np.asarray, images), strict=True))


def test_shares_are_of_what_is_drawn_and_go_into_the_card(large: TrainingRun) -> None:
    true = shown(large)
    known, folder = judge.scene_judge(large), large.folder("judge") / "emoji-xl"
    prompts = {"right": {text: text for text in true}, "nothing": {}}
    right = judge.judge_images(prompts, lambda texts: [true[text] for text in texts], known, folder)
    assert set(right) == {"right"} and set(right["right"]) == {"subject", "colour", "all"}
    assert right["right"]["all"].value == 1 and (folder / "right.png").stat().st_size > 0
    blank = judge.judge_images(
        prompts, lambda texts: [np.full((128, 128, 3), 255, np.uint8)] * len(texts), known, folder
    )
    assert blank["right"]["all"].value == 0
    figures = {"emoji-xl": {"steps": 4, **right}, "emoji-lm": {"expansions": 3, "expansions_good": 0.5}}
    (large.folder("judge") / "figures.json").write_text(json.dumps(figures))
    for name, line in (("emoji-xl", "| right | 100.0 (34.2 to 100.0) |"), ("emoji-lm", "| expansions good | 0.5 |")):
        (large.models / name).mkdir(parents=True)
        cards.write(large.models / name, large)
        card = (large.models / name / "README.md").read_text()
        assert line in card and "{" not in card and "`python -m training.judge --only" in card


def test_image_prompts_shares_are_of_what_is_shown(large: TrainingRun) -> None:
    def copied(texts: object, images: object, strength: float) -> list[Pixels]:
        """The image prompt itself where it is to be read at all, else a blank image."""
        assert isinstance(images, list)
        return [np.asarray(one) if strength else np.full((128, 128, 3), 255, np.uint8) for one in images]

    found = judge.judge_image_prompts(large, COUNT, copied)
    for part in ("subject", "subject_in_colour"):
        assert found["nothing"][part].value == found["text"][part].value == 0
        assert found["image"][part].value == found["text_and_other_image_as_the_image"][part].value == 1
        assert found["text_and_other_image"][part].value < 1
    folder = large.folder("judge")
    assert (folder / "image-prompts.png").stat().st_size > 0
    (folder / "figures.json").write_text(json.dumps({ip_adapter.FOLDER: {"steps": 4, **found}}))
    path = large.models / ip_adapter.FOLDER
    path.mkdir(parents=True)
    cards.write(path, large)
    assert f"| image | {cards.share(found['image']['subject'])} |" in (path / "README.md").read_text()


def test_held_out_chats_are_new_prompts(run: TrainingRun) -> None:
    import random

    run = dataclasses.replace(run, seed=3, shapes=dataclasses.replace(SMOKE, chats=200))
    found = judge_text.held_out_chats(run, 30)
    expander, draw = phrases.Expander(emoji.read_rows(run.data)), random.Random(3)
    known = {expander.draw(draw).prompt for _ in range(200)}
    assert len({chat.prompt for chat in found}) == len(found) > 20
    assert not known & {chat.prompt for chat in found}
