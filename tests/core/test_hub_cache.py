"""Models in the hub's cache: by its own folder, by a snapshot, and with links that lead nowhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from core.hub_cache import model_name, snapshot
from llm.checkpoints import load as text_load
from llm.checkpoints.load import TextModelError
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import load
from tests.pipeline.worlds import SHAPES

COMMIT, OTHER = "0" * 40, "1" * 40


def cached(folder: Path, cache: Path, *, main: bool = True) -> Path:
    """The folder's files as the hub's cache has them: blobs, and links to them."""
    repository = cache / "models--owner--my--model"
    for file in (path for path in folder.rglob("*") if path.is_file()):
        blob = repository / "blobs" / f"{abs(hash(file)):x}"
        link = repository / "snapshots" / COMMIT / file.relative_to(folder)
        for made in (blob, link):
            made.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(blob)
    if main:
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text(COMMIT)
    return repository


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny", SHAPES["plain"])


@pytest.mark.parametrize("main", [True, False])
def test_a_folder_of_the_cache_is_the_model_of_main_or_the_only_one(main: bool, model: Path, tmp_path: Path) -> None:
    repository = cached(model, tmp_path, main=main)
    assert snapshot(repository) == repository / "snapshots" / COMMIT
    for folder in (repository, repository / "snapshots" / COMMIT):
        assert model_name(folder) == "model"
    loaded = load(str(repository))
    assert loaded.name == "model" and loaded.digest == load(str(model)).digest
    assert snapshot(model) == model and model_name(model) == "tiny"


def test_of_several_snapshots_main_decides(model: Path, tmp_path: Path) -> None:
    repository = cached(model, tmp_path)
    (repository / "snapshots" / OTHER).mkdir()
    assert snapshot(repository).name == COMMIT
    (repository / "refs/main").write_text("2" * 40)
    with pytest.raises(ModelError, match=r"is a folder of the hub's cache with 2 snapshots, and none is refs/main"):
        load(str(repository))
    shutil.rmtree(repository / "snapshots")
    for error, function in ((ModelError, load), (TextModelError, text_load.check_name)):
        with pytest.raises(error, match="with 0 snapshots"):  # type: ignore[call-overload]
            function(str(repository))


@pytest.mark.parametrize("file", ["model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"])
def test_a_link_that_leads_nowhere_is_said_to_be_one(file: str, model: Path, tmp_path: Path) -> None:
    repository = cached(model, tmp_path)
    (repository / "snapshots" / COMMIT / file).resolve().unlink()
    name = Path(file).name
    with pytest.raises(ModelError, match=rf"{name} is a link to .*blobs/\w+, which is not there"):
        load(str(repository))


def test_a_text_models_link_that_leads_nowhere_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    with pytest.raises(TextModelError, match=r"config\.json is a link to .*gone, which is not there"):
        text_load.check_name(str(tmp_path))
