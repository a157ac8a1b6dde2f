"""The settings' refiner: loaded beside the model, in a precision of its own, and refused where it is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.card import read_card, to_data
from contract.image import ImageParameters
from contract.refining import Refining
from core.config import Settings
from pipeline import plans
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from pipeline.checkpoints.tiny import TINY
from pipeline.quantization import quantized
from tests.core.quant.stage import CACHE
from tests.pipeline.refiners import second
from tests.workers.desk import drawn
from workers.build import Runtime, build
from workers.cards import image_card


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "tiny-refiner"
    second(tiny.SHAPES[TINY]).save_pretrained(where)
    return where


def settings(folder: Path, **more: Any) -> Settings:
    given = {"model": TINY, "compile": False, "threads": 1, "data_dir": folder, "cache_dir": CACHE.parent}
    return Settings(**{**given, "refiner": str(folder), **more})


def draw(works: Runtime, one: ImageParameters) -> Any:
    (picture,) = drawn(works, [one])
    return picture


WANTED = ImageParameters("a hat", 1, 32, 32, steps=4, refiner=Refining(model="tiny-refiner"))


@pytest.fixture(scope="module")
def works(folder: Path) -> Iterator[Runtime]:
    with build(settings(folder, precision="fp32")) as works:
        yield works


def test_it_takes_the_last_steps_of_requests_that_say_so(works: Runtime) -> None:
    refined, plain = draw(works, WANTED), draw(works, replace(WANTED, refiner=None))
    assert refined.image.tobytes() != plain.image.tobytes()
    assert refined.fingerprint["refiner"]["model"] == "tiny-refiner" and "refiner" not in plain.fingerprint
    card = image_card(works.images)
    assert card.refiners == ("tiny-refiner",) and read_card(to_data(card)) == card


def test_beside_a_model_in_int8_it_is_whole_unless_it_has_such_a_variant(
    folder: Path, tmp_path: Path, works: Runtime
) -> None:
    base = tiny.save(tmp_path / "base", tiny.SHAPES[TINY])
    quantized.make(load(str(base)), ["a hat"], base)
    if works.images.backend.kernels.name == "torch":
        pytest.skip("INT8 needs the CPU kernels")
    with build(settings(folder, model=str(base), precision="int8")) as mixed:
        printed = draw(mixed, WANTED).fingerprint
        assert (printed["precision"], printed["refiner"]["precision"]) == ("int8", "fp32")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"refiner": "random:emoji-xl"}, "emoji-xl: is no SDXL refiner, and cannot take the last steps"),
        ({"refiner": "gone"}, "gone: no such folder"),
        ({"model": "random:emoji-z"}, "tiny-refiner: refines SDXL's pictures, and .* is no SDXL that draws any"),
        ({"model": "tiny-refiner", "refiner": ""}, "tiny-refiner: is a refiner, which draws nothing alone"),
    ],
)
def test_what_is_no_refiner_of_this_model_is_refused(folder: Path, more: dict[str, Any], said: str) -> None:
    more = {name: str(folder) if value == folder.name else value for name, value in more.items()}
    with pytest.raises(ModelError, match=said):
        build(settings(folder, precision="fp32", kernels=False, **more))


def test_the_models_plans_are_no_refiners(folder: Path, tmp_path: Path) -> None:
    plans.write(tmp_path / "plans.json", "fp32", {"plans": {"quick": {"steps": 4}}})
    given = {"plans": str(tmp_path / "plans.json"), "plan": "quick", "precision": "fp32", "kernels": False}
    with build(settings(folder, **given)) as works:
        assert image_card(works.images, plan="quick").plans == {"quick": {"steps": 4}}
        assert "refiner" in draw(works, WANTED).fingerprint
