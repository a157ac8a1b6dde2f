"""Stage `ip_adapter`: trains an IP-Adapter by which emoji-xl draws what a picture shows; its encoder is emoji-clip.

The denoiser, the text towers, the codec and the encoder are frozen (Ye et al., 2023). Four tokens are made of a
picture's embedding, and of them keys and values beside the text's own: keys begin as the text's, values at zero, so
that training begins with what the denoiser draws alone.

    python -m training.adopt --data DATA --work WORK --models models
    python -m training.ip_adapter --data DATA --work WORK --models models --minutes 20
    python -m training.ip_adapter --data DATA --work WORK --models models --export
    python -m training.judge_image_prompts --data DATA --work WORK --models models

The folder `models/emoji-xl-ip-adapters`, with `scenes.safetensors` in it, is then one for DIPTYCH_IP_ADAPTER_DIR.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.ip_adapter_file import ENCODER
from training import cards, loop, tokens, unet
from training.run import TrainingRun, train_or_export
from training.stream import PerSize, SceneStream

DROP_IMAGE, DROP_TEXT, DROP_BOTH = 0.05, 0.05, 0.05  # of rows: as the pipeline's unconditional row has them
PLAIN, PLAIN_TEXT = "a picture", 0.45  # of rows: of which it is the prompt; captions leave pictures little to say
TOKENS = 4
FOLDER, NAME, CLIP = "emoji-xl-ip-adapters", "scenes", "emoji-clip"
MOST_BYTES = 6_000_000


class Adapter(nn.Module):
    """What is trained: the projection of an embedding to tokens, and each cross-attention layer's keys and values."""

    def __init__(self, projection: Any, layers: list[nn.Module]) -> None:
        super().__init__()
        self.projection, self.layers = projection, nn.ModuleList(layers)

    def exported(self) -> dict[str, Tensor]:
        """By the keys of the authors' files, in float16."""
        own = self.projection.state_dict().items()
        found = {f"image_proj.{key.replace('image_embeds.', 'proj.')}": tensor for key, tensor in own}
        for number, layer in enumerate(self.layers):
            own = layer.state_dict().items()
            found |= {f"ip_adapter.{2 * number + 1}.{key.replace('.0.', '.')}": tensor for key, tensor in own}
        return {key: tensor.detach().half().cpu().contiguous() for key, tensor in found.items()}


def adapt_(denoiser: Any, channels: int, seed: int = 0) -> Adapter:
    """Puts a fresh adapter of embeddings of so many channels beside the denoiser's layers, in place.

    Without training it adds nothing.
    """
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

    torch.manual_seed(seed)
    width = denoiser.config.cross_attention_dim
    given: Any = {"device": denoiser.device}
    projection: Any = ImageProjection(channels, width, TOKENS).to(**given)
    processors, layers = {}, []
    for name, processor in denoiser.attn_processors.items():
        attn = denoiser.get_submodule(name.removesuffix(".processor"))
        if attn.is_cross_attention:
            processor = IPAdapterAttnProcessor2_0(attn.inner_dim, width, num_tokens=[TOKENS])
            processor.to_k_ip[0].load_state_dict(attn.to_k.state_dict())
            nn.init.zeros_(processor.to_v_ip[0].weight)
            layers.append(processor.to(**given))
        processors[name] = processor
    denoiser.set_attn_processor(processors)
    denoiser.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    denoiser.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return Adapter(projection, layers)


class Encoder:
    """The exported emoji-clip's vision tower."""

    def __init__(self, run: TrainingRun) -> None:
        from transformers import CLIPModel

        model: Any = CLIPModel.from_pretrained(run.models / CLIP, dtype=torch.float32, local_files_only=True)
        self._vision = model.vision_model.to(run.device).eval().requires_grad_(False)
        self._projection = model.visual_projection.to(run.device).requires_grad_(False)
        self.config: Any = model.config.vision_config

    @torch.no_grad()
    def see(self, pixels: Tensor) -> Tensor:
        """Projected embeddings [B, C], not normalised, of square pixels [B, 3, S, S] in -1..1."""
        if pixels.shape[-1] != self.config.image_size:
            pixels = F.interpolate(pixels, size=self.config.image_size, mode="bicubic", antialias=True)
        found: Tensor = self._projection(self._vision(pixel_values=pixels).pooler_output)
        return found


class ImagePromptLoss:
    """Epsilon's error on noisy pictures that the adapter sees, with their captions or without."""

    def __init__(self, run: TrainingRun, parts: unet.TrainedModules, encoder: Encoder) -> None:
        self._run, self._frozen, self._encoder = run, unet.Frozen.load(run, parts), encoder
        self._model = PerSize(run, parts.unet)
        self._stream = SceneStream(run, run.batch or (256 if run.on_gpu else 32), native=True)
        self._plain = tokens.encode(tokens.clip_tokenizer(run), [PLAIN]).to(run.device)

    def __call__(self, iteration: int, generator: torch.Generator, shift: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """With `shift` each row sees the picture of the scene so many before: to tell what seeing its own brings."""
        run = self._run
        drawn = self._stream.at(iteration)
        pixels = self._stream.draw(drawn)
        seen = self._encoder.see(pixels).roll(shift, 0)
        noised = self._frozen.noised(pixels, generator)
        chance = torch.rand(len(seen), generator=generator, device=run.device)
        both, text = DROP_IMAGE + DROP_BOTH, DROP_IMAGE + DROP_BOTH + DROP_TEXT
        seen = seen * (chance >= both)[:, None]
        keep = ((chance < DROP_IMAGE) | (chance >= text)).float()
        ids = torch.where((chance >= 1 - PLAIN_TEXT)[:, None], self._plain, drawn.ids)
        time_ids = drawn.scenes.time_ids.to(run.device, non_blocking=True)
        told: dict[str, Any] = {"time_ids": time_ids, "image_embeds": [seen[:, None]]}
        with run.autocast():
            states, told["text_embeds"] = self._frozen.read_text(ids, keep)
            model = self._model.at(drawn.scenes.size)
            guess = model(noised.latents, noised.step, states, added_cond_kwargs=told, return_dict=False)[0]
        return self._frozen.objective.loss(guess, noised)


def begun(run: TrainingRun) -> tuple[Adapter, ImagePromptLoss]:
    """A fresh adapter beside a denoiser, and its loss."""
    parts, encoder = unet.load(run), Encoder(run)
    adapter = adapt_(parts.unet, encoder.config.projection_dim, run.seed)
    return adapter, ImagePromptLoss(run, parts, encoder)


def train(run: TrainingRun) -> loop.Outcome:
    """Trains the adapter on the trained denoiser (or the one that the stage `adopt` took)."""
    adapter, loss = begun(run)
    return loop.train(
        loop.Stage(
            "ip_adapter",
            {"adapter": adapter},
            loss,
            rate=1e-3,
            decay=0.0,
            warmup=50,
            average=0.9995 if run.on_gpu else 0.99,
        ),
        run,
    )


def load(run: TrainingRun) -> tuple[Adapter, ImagePromptLoss]:
    """The averaged adapter, beside a denoiser, and its loss; raises `FileNotFoundError` when it is not trained."""
    adapter, loss = begun(run)
    loop.load_average("ip_adapter", {"adapter": adapter}, run)
    return adapter, loss


def export(run: TrainingRun) -> Path:
    """Writes the adapter in the layout of the authors' files, its encoder as a link to emoji-clip, and the card.

    Raises ValueError for a file of more than `MOST_BYTES`.
    """
    from safetensors.torch import save

    about = {"base_model": "emoji-xl", "license": "apache-2.0", "format": "pt", "data": cards.DATA.replace("\n", " ")}
    data = save(load(run)[0].exported(), about)
    path = run.models / FOLDER / f"{NAME}.safetensors"
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path}: has {len(data)} bytes, more than {MOST_BYTES}")
    where = path.parent / ENCODER
    where.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    _write_encoder(run, where)
    (path.parent / "README.md").write_text(_card(run), encoding="utf-8")
    return path


def _write_encoder(run: TrainingRun, where: Path) -> None:
    """A folder of emoji-clip's vision tower, whose weights are those of emoji-clip beside the folder of adapters."""
    config = Encoder(run).config
    config.architectures = ["CLIPVisionModelWithProjection"]
    config.save_pretrained(where)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    side = {"height": config.image_size, "width": config.image_size}
    fitted = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": config.image_size}}
    told = json.dumps({**fitted, "crop_size": side, **half}, indent=2)
    (where / "preprocessor_config.json").write_text(told + "\n", encoding="utf-8")
    weights = where / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(Path("..") / ".." / CLIP / weights.name)


def _card(run: TrainingRun) -> str:
    """What the folder is, with what the curve and the judge's file say."""
    return f"""\
---
license: apache-2.0
library_name: diffusers
tags: [text-to-image, stable-diffusion-xl, ip-adapter, emoji]
---
# {FOLDER}

`{NAME}`: an IP-Adapter of `emoji-xl` (Ye et al., 2023) in the layout of the authors' files: four tokens of a picture's
embedding by `{CLIP}`, whose vision tower is linked in `{ENCODER}`. Where the picture alone is to steer, give it
the prompt "{PLAIN}" and a strength of 1; it was trained with that prompt, and with captions. In Diptych it loads from a
worker's `DIPTYCH_IP_ADAPTER_DIR`. By `StableDiffusionXLPipeline.load_ip_adapter` it loads with
`image_encoder_folder="{ENCODER}"`; give the pipeline that folder's `feature_extractor` before, as diffusers else takes
OpenAI's mean and deviation.

## Data

{cards.DATA} It saw scenes of these.

## Training

{cards.trained("ip_adapter", run)}

Side of the pictures: {run.size} px. Seed {run.seed}. Code: `training/ip_adapter.py`.

## Measured

{_measured(run)}

## Limits

It fits the `emoji-xl` beside which it lies and no other model. Of a picture it reads the embedding by `{CLIP}`
alone, which learned from scenes of emoji and their captions: photographs mean nothing to it.
"""


def _measured(run: TrainingRun) -> str:
    """Shares in per cent, with intervals, of what `training.judge_image_prompts` found."""
    path = run.work / "judge" / "image-prompts.json"
    if not path.exists():
        return "Not measured yet: `python -m training.judge_image_prompts`."
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rows = [["drawn from", "subject", "subject in its colour"], ["---"] * 3]
    for way, own in found.items():
        if isinstance(own, dict):
            rows.append([way.replace("_", " "), cards.share(own["subject"]), cards.share(own["subject_in_colour"])])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""\
By `python -m training.judge_image_prompts`: {found["prompts"]} prompts of one thing in a colour that training never
saw of it, drawn with steps {found["steps"]}, guidance scale {found["guidance_scale"]}, % right (95% interval). The last
lines are of a text and another one's picture at a strength of 0.5, by what the text says and by what the picture shows.

{table}"""


def main() -> None:
    """`python -m training.ip_adapter [--export]`."""
    train_or_export(__doc__ or "", train, export)


if __name__ == "__main__":
    main()
