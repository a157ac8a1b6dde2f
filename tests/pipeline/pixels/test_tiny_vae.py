"""A tiny decoder beside a model's VAE: found in its folder or by name, refused if it does not fit, and drawn with."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.errors import Invalid
from contract.image import Edit, ImageParameters
from contract.plan import AUTO
from core.batching.engine import Engine
from core.batching.request import Request
from pipeline.checkpoints import tiny
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import ImageModel, load
from tests.pipeline import worlds
from tests.pipeline.damage import Damage, edit, remove
from tests.pipeline.worlds import Crank, Watching, apart, levels, options_of, solo, tiny_model, together
from tests.unet_opt.shapes import tiny_vae

WEIGHTS = "vae-tiny/diffusion_pytorch_model.safetensors"


MakeRunner = Callable[[ImageModel], Watching]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(tmp_path_factory.mktemp("models") / "whole", tiny.SDXLShape())
    tiny_vae(8).save_pretrained(folder / "vae-tiny")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def test_it_is_found_beside_the_models_parts_and_changes_none_of_their_digest(folder: Path) -> None:
    with_it = load(str(folder))
    assert with_it.tiny_vae is not None and with_it.vaes == ("full", "tiny")
    mine, theirs = with_it.tiny_vae.network.state_dict(), tiny_vae(8).state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    shutil.rmtree(folder / "vae-tiny")
    without = load(str(folder))
    assert without.tiny_vae is None and without.vaes == ("full",) and without.digest == with_it.digest
    assert load(tiny.TINY).tiny_vae is None


def test_another_may_be_named(folder: Path, tmp_path: Path) -> None:
    tiny_vae(16, seed=3).save_pretrained(tmp_path / "other")
    own, other = load(str(folder)).tiny_vae, load(str(folder), tiny_vae=str(tmp_path / "other")).tiny_vae
    assert own is not None and other is not None and own.digest != other.digest
    assert other.network.config.decoder_block_out_channels == [16] * 4
    shutil.move(tmp_path / "other", tmp_path / "moved")
    moved = load(tiny.TINY, tiny_vae=str(tmp_path / "moved")).tiny_vae
    assert moved is not None and moved.digest == other.digest
    with pytest.raises(ModelError, match="no such folder"):
        load(str(folder), tiny_vae=str(tmp_path / "gone"))


def another(**config: Any) -> Damage:
    def damage(folder: Path) -> None:
        shutil.rmtree(folder / "vae-tiny")
        tiny_vae(8, **config).save_pretrained(folder / "vae-tiny")

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove(WEIGHTS), "vae-tiny: diffusion_pytorch_model.safetensors is missing"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), f"{WEIGHTS}: is damaged"),
        (remove("vae-tiny/config.json"), "vae-tiny: config.json is missing"),
        (edit("vae-tiny/config.json", _class_name="AutoencoderKL"), "vae-tiny is of class AutoencoderKL"),
        (edit("vae-tiny/config.json", act_fn="gelu"), "vae-tiny: act_fn is 'gelu'; supported is 'relu'"),
        (edit("vae-tiny/config.json", scaling_factor=0.5), "vae-tiny: scaling_factor is 0.5; supported is 1.0"),
        (edit("vae-tiny/config.json", num_decoder_blocks=[3, 3, 3, 2]), "vae-tiny: does not fit its config.json"),
        (another(channels=16), "vae-tiny: latent_channels: 16, and the VAE of model has 4"),
        (another(blocks=(1, 1, 1)), "vae-tiny: pixels per latent: 4, and the VAE of model has 8"),
    ],
)
def test_a_wrong_one_is_refused_and_named(damage: Damage, said: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=said) as caught:
        load(str(folder))
    assert str(folder) in str(caught.value)


def wish(seed: int = 1, **fields: Any) -> ImageParameters:
    return ImageParameters("a red cat", seed, 32, 32, **{"steps": 3, "vae": "tiny", **fields})


@pytest.fixture(params=["torch", "kernels", "graphs"])
def runner_of(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> MakeRunner:
    return lambda model: Watching(model, max_rows=16, **options_of(request.param, kernels))


@pytest.fixture
def runner(runner_of: MakeRunner) -> Watching:
    worlds.MORE["heads-of-16"] = tiny.SDXLShape(channels=(16, 32), heads=(1, 2))
    return runner_of(tiny_model("heads-of-16"))


def finished_latents(runner: Watching, wanted: ImageParameters) -> torch.Tensor:
    """What is decoded at the end of a request: [1, C, h, w]."""
    crank, seen = Crank(runner), list[torch.Tensor]()
    request = crank.submit("solo", wanted)

    def look(batch: Any, ticket: Any) -> Any:
        if request.phase == "vae-tiny":
            seen.append(request.work.trajectory.x.clone())
        return ticket

    while crank.turn(look):
        pass
    return seen[0]


def test_a_picture_is_what_diffusers_decodes(runner: Watching) -> None:
    picture, latents = solo(runner, wish()), finished_latents(runner, wish())
    assert runner.model.tiny_vae is not None
    with torch.inference_mode():
        pixels = runner.model.tiny_vae.network.decode(latents).sample
    expected = (pixels / 2 + 0.5).clamp(0, 1)[0].permute(1, 2, 0).numpy() * 255
    assert expected.std() > 10 and apart(picture, expected.round()) <= 1
    assert picture.fingerprint["vae-tiny"] == "0123456789abcdef"
    assert picture.parameters.to_dict()["vae"] == "tiny"


def test_the_vaes_own_pictures_and_fingerprints_stay(runner: Watching, runner_of: MakeRunner) -> None:
    without = runner_of(replace(runner.model, tiny_vae=None))
    for wanted in (wish(vae="full"), wish(2, vae="full", deterministic=True, deepcache=AUTO)):
        assert solo(runner, wanted).png() == solo(without, wanted).png()
    with pytest.raises(Invalid, match=r"^vae: this model has no tiny decoder; it has full$"):
        without.check(Request("no", "image", wish()))
    with pytest.raises(Invalid, match=r"^vae: must be one of full, tiny$"):
        runner.check(Request("no", "image", wish(vae="small")))


def test_both_kinds_share_steps_and_are_decoded_apart(runner: Watching) -> None:
    wanted = [wish(seed, vae="tiny" if seed % 2 else "full", deterministic=seed > 3) for seed in range(6)]
    pictures = together(runner, wanted, lambda: 0)
    assert {phase for phase, _ in runner.rides if phase.startswith("vae")} == {"vae", "vae-tiny"}
    assert any(len({wanted[int(name)].vae for name in ride}) == 2 for ride in runner.companions)
    for one, picture in zip(wanted, pictures, strict=True):
        exact = one.deterministic or runner.backend.batch_invariant
        assert apart(picture, solo(runner, one)) <= (not exact)


def test_an_edit_is_read_by_the_vae_and_decoded_by_the_tiny_one(runner: Watching) -> None:
    source = bytes(np.random.default_rng(0).integers(0, 256, 32 * 32 * 3, dtype=np.uint8))
    mask = bytes([255] * 16 + [0] * 16) * 32
    wanted = wish(edit=Edit(source, mask, 0.7))
    picture = solo(runner, wanted)
    assert [phase for phase, _ in runner.rides][:: len(runner.rides) - 1] == ["image", "vae-tiny"]
    kept = np.frombuffer(source, np.uint8).reshape(32, 32, 3)
    assert (levels(picture)[:, 16:] == kept[:, 16:]).all() and (levels(picture)[:, :16] != kept[:, :16]).any()


def previews(runner: Watching, wanted: ImageParameters) -> tuple[Any, Sequence[np.ndarray]]:
    seen: list[Any] = []
    with Engine([runner]) as engine:
        request = Request("solo", "image", wanted, listener=lambda _, outcome: seen.append(outcome.preview))
        picture = engine.submit(request).result(60)
    return picture, [one for one in seen if one is not None]


@pytest.mark.quick
@pytest.mark.parametrize("deterministic", [False, True])
def test_previews_are_decoded_by_it_and_change_no_picture(runner: Watching, deterministic: bool) -> None:
    for decoder in ("tiny", "full"):
        wanted = wish(steps=6, vae=decoder, deterministic=deterministic)
        picture, seen = previews(runner, replace(wanted, preview_every=1))
        assert [one.shape for one in seen] == [(32, 32, 3)] * 5
        assert apart(picture, solo(runner, wanted)) == 0
    last = levels(solo(runner, replace(wanted, vae="tiny")))
    off = [np.abs(one.astype(int) - last).mean() for one in seen]
    assert off[-1] == min(off) and off[-1] < 0.5 * off[0], "they approach what it decodes at the end"


def test_it_is_timed_after_what_is_usual_and_recorded(runner: Watching) -> None:
    runner.prepare(measure_s=600)
    assert runner.recording.wait(600)
    native = (runner.model.native, runner.model.native)
    compiled = type(runner.backend).__name__ == "GraphBackend"
    found = [*runner.backend.costs.measured()]
    assert found[-1] == ("vae-tiny", native, compiled)
    assert runner.backend.costs.measured()[found[-1]].keys() >= {1, 4}
    assert runner.backend.graphs.counts[0] == runner.backend.graphs.counts[1]
    runner.close()
