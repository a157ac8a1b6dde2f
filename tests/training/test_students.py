"""A student distilled of an exported emoji-xl alone lies beside it, and stock diffusers draws with it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from tests.training.world import Trained, adopted
from training import checkpoint, export, latents, teacher, tiny_vae, turbo, unet

# LCMScheduler and Euler's convert tensors the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_a_student_is_distilled_of_the_exported_model_alone(trained: Trained, tmp_path: Path) -> None:
    from diffusers import AutoencoderTiny, StableDiffusionXLPipeline

    run = adopted(trained, tmp_path, 2, batch=8)
    for name, module in unet.load(run).modules().items():
        for key, tensor in unet.load(trained.run).modules()[name].state_dict().items():
            torch.testing.assert_close(module.state_dict()[key], tensor.half().to(tensor.dtype), rtol=0, atol=0)
    teacher.train(run)
    pairs = teacher.load(run)
    assert len(pairs.ids) == 16
    stock = StableDiffusionXLPipeline.from_pretrained(run.models / "emoji-xl", local_files_only=True)
    stock.set_progress_bar_config(disable=True)
    states, pooled = teacher.Teacher(run).read(pairs.ids[:4].long())
    wanted = stock(
        prompt_embeds=states, pooled_prompt_embeds=pooled, negative_prompt_embeds=torch.zeros_like(states),
        negative_pooled_prompt_embeds=torch.zeros_like(pooled), latents=pairs.noise[:4].float(), height=32, width=32,
        num_inference_steps=teacher.STEPS, guidance_scale=teacher.GUIDANCE, output_type="latent",
    ).images  # fmt: skip
    torch.testing.assert_close(pairs.latents[:4].float(), wanted, atol=0.02, rtol=0.01)

    # So little training leaves the teacher's latents far too wide for a student to learn in a second.
    state = dataclasses.asdict(pairs) | {"latents": pairs.latents / pairs.latents.float().std()}
    checkpoint.save(run.folder("teacher") / "pairs.pt", state)
    longer = dataclasses.replace(run, iterations=150)
    early = turbo.train(dataclasses.replace(run, work=_fresh(run))).loss
    assert turbo.train(longer).loss < 0.9 * early
    tiny_vae.train(longer)
    tiny_vae.load(run).half().save_pretrained(run.models / "emoji-xl" / "vae-tiny")
    folder = export.export_turbo(run)
    assert (folder / "text_encoder").resolve() == (run.models / "emoji-xl" / "text_encoder").resolve()
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    tiny = AutoencoderTiny.from_pretrained(run.models / "emoji-xl" / "vae-tiny")
    given = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "latent"}
    found = pipeline(["red circle", "blue bar"], generator=torch.Generator().manual_seed(0), **given).images
    with torch.no_grad():
        assert tiny.decode(found).sample.shape == (2, 3, 32, 32)
    assert found.isfinite().all() and float(latents.load_codec(run).config.scaling_factor) > 0


def _fresh(run: teacher.TrainingRun) -> Path:
    """Another work folder with the same pairs and teacher."""
    work = run.work.parent / "again"
    shutil.copytree(run.work, work, ignore=shutil.ignore_patterns("turbo"))
    assert checkpoint.load(work / "turbo" / "state.pt") is None
    return work
