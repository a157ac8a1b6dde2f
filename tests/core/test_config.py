"""Settings: the names of embedded models, and bounds of one by another."""

from __future__ import annotations

from pathlib import Path

import pytest

from core import config
from core.config import Settings, SettingsError


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of embedded models, and a working folder without any."""
    folder = tmp_path / "models"
    for name in ("emoji-xl", "emoji-z"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model_index.json").write_text("{}")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(config, "EMBEDDED_MODEL", folder / "emoji-xl")
    return folder


def test_an_embedded_model_is_found_by_its_name(models: Path) -> None:
    assert Settings(model="emoji-z").model_name == str(models / "emoji-z")
    assert Settings().model_name == str(models / "emoji-xl")


@pytest.mark.parametrize("name", ["emoji-none", "random:emoji-xl", "stabilityai/sdxl", "../models/emoji-z"])
def test_other_names_are_what_they_say(models: Path, name: str) -> None:
    assert Settings(model=name).model_name == name


def test_an_added_model_is_found_by_its_name_after_the_embedded_ones(models: Path, tmp_path: Path) -> None:
    added = tmp_path / "added"
    for name in ("cats", "emoji-z"):
        (added / name).mkdir(parents=True)
        (added / name / "model_index.json").write_text("{}")
    assert Settings(model="cats", models_dir=added).model_name == str(added / "cats")
    assert Settings(model="emoji-z", models_dir=added).model_name == str(models / "emoji-z")
    assert Settings(model="dogs", models_dir=added).model_name == "dogs"
    Path("cats").mkdir()
    assert Settings(model="cats", models_dir=added).model_name == "cats"


def test_added_models_are_in_the_data_folder_and_those_of_the_usual_one_are_found_too(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    usual = tmp_path / "home/.local/share/diptych/models"
    assert Settings().model_stores == [usual]
    disk = Settings(data_dir=tmp_path / "disk", model="cats")
    assert disk.model_stores == [tmp_path / "disk/models", usual]
    for store in reversed(disk.model_stores):
        assert disk.model_name != str(store / "cats")
        (store / "cats").mkdir(parents=True)
        (store / "cats" / "model_index.json").write_text("{}")
        assert disk.model_name == str(store / "cats"), "the data folder's own first"
    assert Settings(data_dir=tmp_path / "disk", models_dir=tmp_path / "other").model_stores == [tmp_path / "other"]


def test_a_folder_of_that_name_comes_first(models: Path) -> None:
    Path("emoji-z").mkdir()
    assert Settings(model="emoji-z").model_name == "emoji-z"


@pytest.mark.parametrize(("given", "most"), [({"warm_wait_s": 16}, 15), ({"warm_wait_s": 4, "lease_s": 2.5}, 2.5)])
def test_a_job_is_offered_for_a_lease_at_most(given: dict[str, float], most: float) -> None:
    """Sweeps count no message of an offered job as lost."""
    with pytest.raises(SettingsError, match=rf"^--warm-wait-s: must not exceed DIPTYCH_LEASE_S \({most:g} s\)$"):
        config.read(**given)
    assert config.read(**{**given, "lease_s": given["warm_wait_s"]}).warm_wait_s == given["warm_wait_s"]


def test_a_catalogue_of_texts_does_so_too(models: Path) -> None:
    """A draft model is of the first one's vocabulary; a lookup needs none."""
    given = Settings(text_models="emoji-lm, poet", text_draft="emoji-lm-draft", models_dir=models / "store")
    for folder in (models / "emoji-lm", models / "store" / "poet"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
    assert [each.text_model_name for each in given.text_catalogue] == [
        str(models / "emoji-lm"),
        str(models / "store" / "poet"),
    ]
    assert given.text_model_name == str(models / "emoji-lm")
    assert [each.text_draft for each in given.text_catalogue] == ["emoji-lm-draft", ""]
    assert {each.text_draft for each in Settings(text_models="a,b", text_draft="lookup").text_catalogue} == {"lookup"}
    named = Settings(text_model="poet", text_models="a,poet").text_catalogue
    assert [(each.text_model, each.text_models) for each in named] == [("poet", ""), ("a", "")]
    assert Settings(text_model="off", text_models="a,b").text_catalogue == []
    with pytest.raises(SettingsError, match=r"^--text-models: "):
        config.read(text_models=",a")


def test_a_catalogue_begins_with_the_one_model_and_names_each_once(models: Path) -> None:
    given = Settings(models="emoji-z, cats,emoji-xl", unet="u", lora="ink", plan="fast", lora_dir="loras")
    assert given.model_name == str(models / "emoji-z")
    first, *others = given.catalogue
    assert [each.model for each in given.catalogue] == ["emoji-z", "cats", "emoji-xl"]
    assert (first.unet, first.lora, first.plan) == ("u", "ink", "fast")
    assert {(each.unet, each.lora, each.plan, each.lora_dir) for each in others} == {("", "", "", "loras")}
    assert [each.model for each in Settings(model="cats", models="emoji-z,cats").catalogue] == ["cats", "emoji-z"]
    assert {each.plan for each in Settings(models="a,b", plan="auto").catalogue} == {"auto"}
    (alone,) = Settings(model="cats").catalogue
    assert alone.model == "cats" and Settings().catalogue[0].model_name == str(models / "emoji-xl")
    with pytest.raises(SettingsError, match=r"^--models: "):
        config.read(models="a,,b")


def test_cascades_are_scored_by_emoji_clip_beside_embedded_models_alone(models: Path) -> None:
    assert Settings().scorer_folder is None, "it is not installed"
    (models / "emoji-clip").mkdir()
    (models / "emoji-clip" / "config.json").write_text("{}")
    for given in (Settings(), Settings(models="emoji-z,emoji-xl"), Settings(model=str(models / "emoji-z"))):
        assert given.scorer_folder == models / "emoji-clip"
    assert Settings(models="cats,emoji-z").scorer_folder is None
    assert Settings(model="cats", cascade_scorer="vit").scorer_folder == Path("vit")


def test_an_alias_that_is_wrong_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_MODEL_ALIASES", "gpt-image-1=emoji-xl,dall-e-3")
    with pytest.raises(SettingsError, match=r"^DIPTYCH_MODEL_ALIASES: 'dall-e-3' must be alias=model$"):
        config.read()
    assert Settings(model_aliases="a=x, b=y").aliases == {"a": "x", "b": "y"}
