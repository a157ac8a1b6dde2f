"""All stages learn, and what they export loads in the stock classes, draws, scores and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.training import latents, stream, tokens, unet, vae
from lab.training.shapes import EMOJI
from tests.json_lines import whole_lines
from tests.lab.training.world import Trained

# EulerDiscreteScheduler converts tensors the old way.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_losses_fall(trained: Trained) -> None:
    for stage, key, share in (
        ("vae", "loss", 0.75), ("clip", "loss", 0.8), ("unet", "eps", 0.7), ("lm", "nats", 0.5), ("draft", "loss", 0.8),
        ("tiny_vae", "loss", 0.9),
    ):  # fmt: skip
        first, *_, last = whole_lines(trained.run.work / stage / "curve.jsonl")
        assert last[key] < share * first[key], stage


def test_training_and_the_pipeline_read_a_caption_alike(trained: Trained) -> None:
    from diffusers import StableDiffusionXLPipeline

    run = trained.run
    pipeline: Any = StableDiffusionXLPipeline.from_pretrained(run.models / "emoji-xl", local_files_only=True)
    text = "waving hand: dark skin tone on an orange background"
    with torch.no_grad():
        states, _, pooled, _ = pipeline.encode_prompt(text, device="cpu", do_classifier_free_guidance=False)
    parts = unet.load(run)
    ids = tokens.encode(tokens.clip_tokenizer(run), [text])
    end, pad_2 = tokens.clip_tokenizer(run).eos_token_id, tokens.pad_ids(run)[1]
    own, own_pooled = unet.read_text(parts, ids, tokens.repad(ids, end, pad_2))
    assert float((own - states).norm() / states.norm()) < 5e-3
    assert float((own_pooled - pooled).norm() / pooled.norm()) < 5e-3


def test_the_noise_schedule_is_the_schedulers(trained: Trained) -> None:
    from diffusers import EulerDiscreteScheduler

    scheduler = EulerDiscreteScheduler.from_pretrained(trained.run.models / "emoji-xl" / "scheduler")
    mine = unet.alphas_bar(torch.device("cpu"))
    assert float((mine - scheduler.alphas_cumprod).abs().max()) < 1e-5
    weight = unet.weights(mine)
    assert float(weight.min()) > 0 and float(weight.max()) < 5


def test_latents_are_centred_and_the_codec_still_inverts_them(trained: Trained) -> None:
    run = trained.run
    codec, plain = latents.load_codec(run), vae.load(run)
    factor = codec.config.scaling_factor
    drawn = stream.SceneStream(run, 64, native=True)
    true = drawn.draw(drawn.at(2**31))
    values = latents.encode(run, codec, true) * factor
    assert float(values.mean().abs()) < 0.25 and 0.6 < float(values.std()) < 1.5
    with torch.no_grad():
        made = codec.decode(values / factor).sample
        direct = plain.decode(plain.encode(true).latent_dist.mode()).sample
    assert float((made - direct).abs().mean()) < 1e-3
    assert float((made - true).square().mean()) < 0.75 * float(true.var())


def test_the_tiny_codec_reads_the_codecs_latents(trained: Trained) -> None:
    from diffusers import AutoencoderTiny

    tiny = AutoencoderTiny.from_pretrained(trained.run.models / "emoji-xl" / "vae-tiny")
    with torch.no_grad():
        assert tiny.decode(torch.zeros(2, 4, 4, 4)).sample.shape == (2, 3, 32, 32)


def test_the_judge_measured_every_line(trained: Trained) -> None:
    figures = trained.figures
    assert set(figures) == {"emoji-lm", "emoji-lm-draft"}
    assert 1 < figures["emoji-lm"]["captions_perplexity"] < 50
    assert 1 <= figures["emoji-lm-draft"]["sampled_accepted_length"] <= EMOJI.draft_block
    assert figures["emoji-lm-draft"]["greedy_accepted_length"] >= 1
    card = (trained.run.models / "emoji-lm" / "README.md").read_text(encoding="utf-8")
    assert "captions perplexity" in card and "Not measured" not in card


@pytest.mark.parametrize("name", ["gpu", "scenes"])
def test_the_plans_for_the_gpu_parse(name: str) -> None:
    import subprocess

    script = Path(__file__).parents[3] / "lab" / "training" / f"{name}.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
