"""The Z-Image's batches are diffusers' own values, its captions are the pipeline's, and what it exports draws."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evaluation.scenes import emoji
from pipeline.checkpoints import tiny_zimage
from pipeline.checkpoints.tiny_zimage import SHAPES, STEPS, TINY_Z
from tests.training.world import Trained
from training import captions, zimage, zimage_forward, zimage_tokens, zimage_vae
from training.run import TrainingRun

# EulerDiscreteScheduler, which the fixture's other models use, converts tensors the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def load(trained: Trained) -> Any:
    from diffusers import ZImagePipeline

    pipeline = ZImagePipeline.from_pretrained(trained.run.models / "emoji-z", local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize(("side", "lengths"), [(4, (5, 32, 17)), (16, (33, 64, 40)), (16, (1, 31, 8))])
def test_a_batch_has_the_values_of_diffusers_and_transformers(side: int, lengths: tuple[int, ...]) -> None:
    parts = tiny_zimage.parts(SHAPES[TINY_Z])
    transformer, text, pad = parts["transformer"], parts["text_encoder"], parts["tokenizer"].pad_token_id
    torch.manual_seed(1)
    long, count = -(-max(lengths) // 32) * 32, torch.tensor(lengths)
    ids = torch.where(torch.arange(long) < count[:, None], torch.randint(256, (len(lengths), long)), pad)
    latents, t = torch.randn(len(lengths), 16, side, side), torch.rand(len(lengths))
    with torch.no_grad():
        mask = ids != pad
        states = text(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
        rows = [states[row, :n] for row, n in enumerate(lengths)]
        wanted = torch.stack(transformer(list(latents[:, :, None]), t, rows, return_dict=False)[0])[:, :, 0]
        batch = zimage_forward.ZImageBatch(copy.deepcopy(transformer), text)
        found = batch(latents, t, ids, count, *batch.turns(long, side // 2, side // 2))
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_patches_come_back() -> None:
    latents = torch.randn(2, 16, 6, 4)
    assert torch.equal(zimage_forward.unpatchify(zimage_forward.patchify(latents), latents.shape), latents)


def test_the_levels_are_those_of_the_pipeline(run: TrainingRun, trained: Trained) -> None:
    pipeline = load(trained)
    pipeline("nose", height=32, width=32, num_inference_steps=STEPS, guidance_scale=0.0, output_type="latent")
    seen = pipeline.scheduler.sigmas
    torch.testing.assert_close(torch.cat((zimage.sigmas(run), torch.zeros(1))), seen)


def test_training_and_the_pipeline_read_a_caption_alike(trained: Trained) -> None:
    pipeline, run = load(trained), trained.run
    caption = "waving hand: dark skin tone on an orange background"
    parts = zimage.load(run)
    ids = zimage_tokens.encode(zimage_tokens.tokenizer(run), [caption])
    length = int((ids != pipeline.tokenizer.pad_token_id).sum())
    ours = zimage_forward.read(parts.text.bfloat16().float(), ids)[0, :length]
    theirs = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)[0][0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_batches_hold_what_their_bucket_says_and_no_hidden_picture(trained: Trained) -> None:
    run = trained.run
    batches = zimage.Batches(dataclasses.replace(run, batch=512))
    rows, reader = emoji.read_rows(run.data), zimage_tokens.tokenizer(run)
    hidden = {rows[index].name for index in captions.held_out(rows, run.held_out)}
    generator = torch.Generator().manual_seed(0)
    assert hidden
    ids, lengths, clean = batches.draw(0, generator)
    assert clean.shape == (512, 16, 4, 4)
    assert ids.shape == (512, 32) and int(lengths.max()) <= 32
    texts = [reader.decode(one[:n]) for one, n in zip(ids, lengths, strict=True)]
    assert all(text.startswith("<|im_start|>user\n") and text.endswith("<|im_start|>assistant\n") for text in texts)
    said = {text.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0] for text in texts}
    assert "" in said and not hidden & said
    assert len(said) > 100
    steps = [batches.bucket(iteration) for iteration in range(2 * zimage.LONG_EVERY)]
    assert sum(steps) in (0, 2)
    if sum(steps):
        ids, lengths, _ = batches.draw(1, generator)
        assert ids.shape == (512, 64) and int(lengths.min()) > 32


def test_the_codec_starts_from_the_other_ones_layers(trained: Trained, tmp_path: Path) -> None:
    run = trained.run
    codec = zimage_vae.build(run)
    fresh = {key: value.clone() for key, value in codec.state_dict().items()}
    zimage_vae.adopt_(codec, run)
    taken = {key for key, value in codec.state_dict().items() if not torch.equal(value, fresh[key])}
    assert any(key.startswith("decoder.up_blocks") for key in taken)
    assert not {key for key in taken if key.startswith(("encoder.conv_out", "decoder.conv_in"))}
    with pytest.raises(FileNotFoundError, match="train the stage vae first"):
        zimage_vae.adopt_(codec, dataclasses.replace(run, work=tmp_path, models=tmp_path))


def test_latents_are_those_of_the_exported_codec(trained: Trained) -> None:
    run, pipeline = trained.run, load(trained)
    values = zimage_vae.load_latents(run).float()
    assert abs(float(values.mean())) < 0.5 and 0.5 < float(values.std()) < 2
    rows = emoji.read_rows(run.data)[:4]
    white = emoji.composite(emoji.read_pictures(run.data, rows, run.size), torch.ones(4, 3))
    config = pipeline.vae.config
    with torch.no_grad():
        found = (pipeline.vae.encode(white).latent_dist.mean - config.shift_factor) * config.scaling_factor
    torch.testing.assert_close(found, values[0, :4], atol=0.1, rtol=0)  # the exported weights have eight bits


def test_the_pipeline_loads_unmodified_and_follows_the_caption(trained: Trained) -> None:
    pipeline = load(trained)

    def draw(caption: str) -> Tensor:
        seed = torch.Generator().manual_seed(5)
        given: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": 0.0, "output_type": "pt"}
        found: Tensor = pipeline(caption, height=32, width=32, generator=seed, **given).images[0]
        return found

    one = draw("red circle on a blue background")
    assert one.shape == (3, 32, 32)
    torch.testing.assert_close(one, draw("red circle on a blue background"), atol=1e-4, rtol=0)
    assert (one - draw("green bar on a yellow background")).abs().mean() > 0.02


def test_the_judge_measures_it(trained: Trained) -> None:
    figures = trained.figures["emoji-z"]
    assert (figures["steps"], figures["guidance_scale"], figures["prompts"]) == (STEPS, 0.0, 2)
    assert (trained.run.work / "judge" / "emoji-z" / "single.png").stat().st_size > 1000
    card = (trained.run.models / "emoji-z" / "README.md").read_text(encoding="utf-8")
    assert "| single |" in card and "`zimage_vae`: 60 iterations" in card


@pytest.mark.parametrize("seed", range(3))
def test_recasing_changes_case_alone(seed: int) -> None:
    import random

    draw = random.Random(seed)
    found = {zimage_tokens.recased("mrs. Claus", draw) for _ in range(200)}
    assert found == {"mrs. Claus", "Mrs. Claus", "mrs. claus"}
