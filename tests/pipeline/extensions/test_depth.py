"""Depth maps are those of transformers' pipeline, near in white; folders that are no depth models are refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.depth import DepthEstimator
from tests.pipeline.depths import KINDS, save
from tests.pipeline.pixels.test_edit import photograph


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save(tmp_path_factory.mktemp("depth") / kind, kind) for kind in KINDS}


def picture(width: int, height: int, seed: int) -> np.ndarray:
    return np.asarray(photograph(max(width, height), seed))[:height, :width].copy()


@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_those_of_transformers_pipeline(kind: str, folders: dict[str, Path]) -> None:
    from PIL.Image import fromarray
    from transformers import pipeline

    estimate = DepthEstimator(folders[kind])
    reference = pipeline("depth-estimation", model=str(folders[kind]))
    made = [estimate(picture(64, 64, seed)).astype(int) for seed in range(2)]
    assert np.abs(made[0] - made[1]).mean() > 2, "a map of any picture would prove nothing"
    for seed, (width, height) in enumerate(((96, 64), (40, 72))):
        pixels = picture(width, height, seed)
        found, told = estimate(pixels), reference(fromarray(pixels))
        assert found.shape == (height, width, 3) and (found.min(), found.max()) == (0, 255)
        assert np.array_equal(found[..., 0], found[..., 1]) and np.array_equal(found[..., 0], found[..., 2])
        assert found.std() > 5, "a flat map would prove nothing"
        if kind not in ("metric", "glpn"):
            assert np.array_equal(found[..., 0], np.asarray(told["depth"]))
            continue
        near = 1 / np.maximum(told["predicted_depth"].numpy(), 1e-3)  # the pipeline draws what is far in white
        near = (near - near.min()) / (near.max() - near.min())
        assert np.array_equal(found[..., 0], (near * 255).astype(np.uint8))


def test_a_picture_without_depth_is_black(tmp_path: Path) -> None:
    folder = save(tmp_path / "flat")
    path = folder / "model.safetensors"
    weights = {name: np.zeros_like(one) if name.startswith("head") else one for name, one in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    assert not DepthEstimator(folder)(picture(64, 64, 0)).any()


def test_pictures_of_several_threads_are_those_of_one(folders: dict[str, Path]) -> None:
    estimate = DepthEstimator(folders["dpt"])
    pictures = [picture(48, 48, seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(estimate, pictures))
    for one, made in zip(pictures, together, strict=True):
        assert np.array_equal(estimate(one), made)


def test_a_model_may_lack_what_it_does_not_read(tmp_path: Path) -> None:
    """As the published DPT ones do."""
    folder = save(tmp_path / "dpt", "dpt")
    expected, path = DepthEstimator(folder)(picture(64, 64, 0)), folder / "model.safetensors"
    unread = "neck.fusion_stage.layers.0.residual_layer1."
    kept = {name: one for name, one in load_file(path).items() if not name.startswith(unread)}
    save_file(kept, path, {"format": "pt"})
    assert np.array_equal(DepthEstimator(folder)(picture(64, 64, 0)), expected)
    del kept["head.head.0.weight"]
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing keys, the first is head\.head\.0\.weight"):
        DepthEstimator(folder)


def test_what_is_no_depth_model_is_named(tmp_path: Path) -> None:
    def refused(folder: Path, words: str) -> None:
        with pytest.raises(ModelError, match=f"^depth model: .*{words}"):
            DepthEstimator(folder)

    refused(tmp_path / "gone", "gone: no such folder")
    folder = save(tmp_path / "one")
    refused(tmp_path, "config.json is missing")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-9])
    refused(folder, "model.safetensors: is damaged")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pickles can run code and are not read")
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    refused(folder, "preprocessor_config.json: does not load")
    (folder / "preprocessor_config.json").unlink()
    refused(folder, "preprocessor_config.json is missing")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "clip"}))
    refused(folder, "model_type is 'clip', and must be one of dpt, depth_anything, glpn, zoedepth")
