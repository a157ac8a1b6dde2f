"""Stage `ip_adapter`: trains an IP-Adapter by which emoji-xl draws what a picture shows; its encoder is emoji-clip.

The denoiser, the text towers, the codec and the encoder are frozen (Ye et al., 2023). Four tokens are made of a
picture's embedding, and of them keys and values beside the text's own. Tokens begin as the caption's states, as far as
a linear map finds them in the embedding, keys as the text's, and values as the text's at a share of their size.

It is distilled (Hinton et al., 2015): the teacher is the denoiser without an adapter, which reads the caption; most
rows of the student read the picture and "a picture" instead, and are to guess what the teacher guesses of the same
noisy latents. The true noise counts little beside: what no caption foretells is most of its error.

    python -m training.adopt --data DATA --work WORK --models models
    python -m training.ip_adapter --data DATA --work WORK --models models --minutes 20
    python -m training.ip_adapter --data DATA --work WORK --models models --export

The folder `models/emoji-xl-ip-adapters`, with `scenes.safetensors` in it, is then one for DIPTYCH_IP_ADAPTER_DIR.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.extensions.ip_adapter_file import ENCODER
from training import cards, loop, tokens, unet
from training.export import write_weights
from training.group import average_
from training.run import TrainingRun, command
from training.stream import PerSize, SceneStream

DROP_IMAGE, DROP_TEXT, DROP_BOTH = 0.05, 0.05, 0.05  # of rows: as the pipeline's unconditional row has them
PLAIN, PLAIN_TEXT = "a picture", 0.75  # of rows: of which it is the prompt; captions leave pictures little to say
BEGUN, RIDGE = 0.5, 0.1  # of the text's values, those that training begins with; of the mean variance, the penalty
STARTS = 16  # batches that the map is fitted to
NOISE = 0.1  # weight of epsilon's error beside the distance to the teacher
TOKENS = 4
FOLDER, NAME, CLIP = "emoji-xl-ip-adapters", "scenes", "emoji-clip"
MOST_BYTES = 6_000_000


class Adapter(nn.Module):
    """The trained part: the projection of an embedding to tokens, and each cross-attention layer's keys and values."""

    def __init__(self, projection: Any, layers: list[nn.Module]) -> None:
        super().__init__()
        self.projection, self.layers = projection, nn.ModuleList(layers)

    def exported(self) -> dict[str, Tensor]:
        """The tensors by the keys of the authors' files, in float16."""
        state = self.projection.state_dict().items()
        tensors = {f"image_proj.{key.replace('image_embeds.', 'proj.')}": tensor for key, tensor in state}
        for number, layer in enumerate(self.layers):
            state = layer.state_dict().items()
            tensors |= {f"ip_adapter.{2 * number + 1}.{key.replace('.0.', '.')}": tensor for key, tensor in state}
        return {key: tensor.detach().half().cpu().contiguous() for key, tensor in tensors.items()}


def adapt_(denoiser: Any, channels: int, seed: int = 0) -> Adapter:
    """Puts a fresh adapter of embeddings of so many channels beside the denoiser's layers, in place."""
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

    torch.manual_seed(seed)
    width = denoiser.config.cross_attention_dim
    factory: Any = {"device": denoiser.device}
    projection: Any = ImageProjection(channels, width, TOKENS).to(**factory)
    processors, layers = {}, []
    for name, processor in denoiser.attn_processors.items():
        attn = denoiser.get_submodule(name.removesuffix(".processor"))
        if attn.is_cross_attention:
            processor = IPAdapterAttnProcessor2_0(attn.inner_dim, width, num_tokens=[TOKENS])
            processor.to_k_ip[0].load_state_dict(attn.to_k.state_dict())
            processor.to_v_ip[0].load_state_dict({"weight": BEGUN * attn.to_v.weight})
            layers.append(processor.to(**factory))
        processors[name] = processor
    denoiser.set_attn_processor(processors)
    denoiser.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    denoiser.register_to_config(encoder_hid_dim_type="ip_image_proj")
    return Adapter(projection, layers)


@torch.no_grad()
def start_(projection: Any, seen: Tensor, states: Tensor) -> None:
    """Fits the projection by ridge regression of tokens [B, TOKENS, C] on embeddings [B, D], in place.

    The norm of each token is the projection's: its gain brings what is found back to the tokens' size.
    """
    gain, shift = states.std((0, 1)) + 1e-6, states.mean((0, 1))
    targets = ((states - shift) / gain).flatten(1)
    inputs, middle = seen - seen.mean(0), targets.mean(0)
    square = inputs.T @ inputs / len(inputs)
    square += RIDGE * square.diagonal().mean() * torch.eye(len(square), device=seen.device)
    solution = torch.linalg.solve(square, inputs.T @ (targets - middle) / len(inputs))
    guessed = (inputs @ solution + middle).view_as(states)
    projection.image_embeds.weight.copy_(solution.T)
    projection.image_embeds.bias.copy_(middle - seen.mean(0) @ solution)
    projection.norm.weight.copy_(gain * guessed.std(-1).mean())
    projection.norm.bias.copy_(shift)


class ImageEncoder:
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
        features: Tensor = self._projection(self._vision(pixel_values=pixels).pooler_output)
        return features


class ImagePromptLoss:
    """The distance of the adapted denoiser from the teacher, which reads the caption, and from the noise."""

    def __init__(self, run: TrainingRun, parts: unet.TrainedModules, teacher: nn.Module, encoder: ImageEncoder) -> None:
        self._run, self._frozen, self._encoder = run, unet.Frozen.load(run, parts), encoder
        self._model, self._teacher = PerSize(run, parts.unet), PerSize(run, teacher)
        self._stream = SceneStream(run, run.batch or (256 if run.on_gpu else 32), native=True)
        self._plain = tokens.encode(tokens.clip_tokenizer(run), [PLAIN]).to(run.device)
        signal = unet.alphas_bar(run.device)
        # A teacher's guess has no noise of its own: its errors may count more where the subject is settled.
        self._weight = unet.weights(signal) * ((1 - signal) / signal) ** 0.25

    def __call__(self, iteration: int, generator: torch.Generator, shift: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss; with `shift` each row sees the picture of the scene so many before: to tell what seeing its own
        brings.
        """
        run = self._run
        batch = self._stream.at(iteration)
        pixels = self._stream.draw(batch)
        seen = self._encoder.see(pixels).roll(shift, 0)
        noised = self._frozen.noised(pixels, generator)
        chance = torch.rand(len(seen), generator=generator, device=run.device)
        both, text = DROP_IMAGE + DROP_BOTH, DROP_IMAGE + DROP_BOTH + DROP_TEXT
        seen = seen * (chance >= both)[:, None]
        heard = ((chance < DROP_IMAGE) | (chance >= both)).float()
        keep = heard * ((chance < both) | (chance >= text))
        plain = chance >= 1 - PLAIN_TEXT
        time_ids = batch.scenes.time_ids.to(run.device, non_blocking=True)
        size, ones = batch.scenes.size, torch.ones(1, device=run.device)

        def guess(model: PerSize, states: Tensor, pooled: Tensor, keep: Tensor, **more: Any) -> Tensor:
            conditions = {"time_ids": time_ids, "text_embeds": pooled * keep[:, None], **more}
            inputs = noised.latents, noised.step, states * keep[:, None, None]
            prediction: Tensor = model.at(size)(*inputs, added_cond_kwargs=conditions, return_dict=False)[0]
            return prediction

        with run.autocast():
            states, pooled = self._frozen.read_text(batch.ids, ones.expand(len(seen)))
            with torch.no_grad():
                target = guess(self._teacher, states, pooled, heard)
            other, other_pooled = self._frozen.read_text(self._plain, ones)
            states = torch.where(plain[:, None, None], other, states)
            pooled = torch.where(plain[:, None], other_pooled, pooled)
            prediction = guess(self._model, states, pooled, keep, image_embeds=[seen[:, None]])
        noise, logged = self._frozen.objective.loss(prediction, noised)
        apart = (prediction.float() - target.float()).square().mean(dim=(1, 2, 3))
        taught = (self._weight[noised.step] * apart).mean()
        return taught + NOISE * noise, {**logged, "taught": taught.detach()}

    @torch.no_grad()
    def examples(self, batches: int) -> tuple[Tensor, Tensor]:
        """Embeddings [B, D] of the first pictures, and of their captions what tokens begin as, [B, TOKENS, C].

        These are the states of END, which has read the caption, of the token before it and of the last padding, and
        the mean of the words'.
        """
        embeddings, states = [], []
        for iteration in range(batches):
            batch = self._stream.at(iteration)
            embeddings.append(self._encoder.see(self._stream.draw(batch)))
            read = self._frozen.read_text(batch.ids, torch.ones(len(batch.ids), device=batch.ids.device))[0]
            words = (batch.ids != self._frozen.end).float()
            row, end = torch.arange(len(read), device=read.device), words.sum(1).long()
            mean = torch.einsum("blc,bl->bc", read, words / words.sum(1, keepdim=True))
            states.append(torch.stack([read[row, end], read[row, end - 1], mean, read[:, -1]], 1))
        return torch.cat(embeddings), torch.cat(states)


def begun(run: TrainingRun) -> tuple[Adapter, ImagePromptLoss]:
    """A fresh adapter beside a denoiser, and its loss."""
    parts, encoder = unet.load(run), ImageEncoder(run)
    teacher = copy.deepcopy(parts.unet)
    adapter = adapt_(parts.unet, encoder.config.projection_dim, run.seed)
    return adapter, ImagePromptLoss(run, parts, teacher, encoder)


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the adapter on the trained denoiser (or the one that the stage `adopt` took)."""
    adapter, loss = begun(run)
    if not (run.folder("ip_adapter") / "state.pt").exists():
        start_(adapter.projection, *loss.examples(STARTS))
        if run.world > 1:  # each process saw pictures of its own
            average_([parameter.data for parameter in adapter.projection.parameters()])
    average = 0.9995 if run.on_gpu else 0.99
    stage = loop.Stage("ip_adapter", {"adapter": adapter}, loss, rate=1e-3, decay=0.0, warmup=50, average=average)
    return loop.train(stage, run)


def load(run: TrainingRun) -> tuple[Adapter, ImagePromptLoss]:
    """The averaged adapter, beside a denoiser, and its loss; raises `FileNotFoundError` when it is not trained."""
    adapter, loss = begun(run)
    loop.load_average("ip_adapter", {"adapter": adapter}, run)
    return adapter, loss


def export(run: TrainingRun) -> Path:
    """Write the adapter in the layout of the authors' files, its encoder as a link to emoji-clip, and the card."""
    metadata = {
        "base_model": "emoji-xl",
        "license": "apache-2.0",
        "format": "pt",
        "data": cards.DATA.replace("\n", " "),
    }
    path = run.models / FOLDER / f"{NAME}.safetensors"
    write_weights(path, load(run)[0].exported(), metadata, MOST_BYTES)
    _write_encoder(run, path.parent / ENCODER)
    cards.write(path.parent, run)
    return path


def _write_encoder(run: TrainingRun, where: Path) -> None:
    """A folder of emoji-clip's vision tower, whose weights are those of emoji-clip beside the folder of adapters."""
    config = ImageEncoder(run).config
    config.architectures = ["CLIPVisionModelWithProjection"]
    where.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(where)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    side = {"height": config.image_size, "width": config.image_size}
    fitted = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": config.image_size}}
    text = json.dumps({**fitted, "crop_size": side, **half}, indent=2)
    (where / "preprocessor_config.json").write_text(text + "\n", encoding="utf-8")
    weights = where / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(Path("..") / ".." / CLIP / weights.name)


if __name__ == "__main__":
    command(__doc__, train, export)
