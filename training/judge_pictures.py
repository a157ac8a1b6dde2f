"""Evaluates `emoji-xl`, `emoji-z` and `emoji-clip`: right subject, background, tone and caption; writes contact sheets.

Uses the exported models through diffusers' and transformers' own classes, and the true images.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from pipeline.tiny_zimage import STEPS
from training import captions, pictures, sheet
from training.run import TrainingRun

MODELS = ("emoji-xl", "emoji-xl-turbo", "emoji-z", "emoji-clip")
SIDE = 32
TURBO_STEPS = 4
CHUNK = 32
SEED = 1234
SHOWN = (
    "pizza", "red heart", "cat face", "dog face", "rose", "tiger face", "red apple", "banana", "rocket", "rainbow",
    "crying face", "smiling face with sunglasses", "ghost", "robot", "alien", "skull", "unicorn", "panda", "fox", "owl",
    "octopus", "butterfly", "snail", "cactus", "sunflower", "mushroom", "watermelon", "strawberry", "hamburger",
    "doughnut", "birthday cake", "teapot", "soccer ball", "guitar", "trophy", "crown", "umbrella", "key", "hammer",
    "light bulb", "airplane", "bicycle", "locomotive", "sailboat", "house", "castle", "volcano", "full moon", "star",
    "snowman", "fire", "water wave", "thumbs up: medium skin tone", "waving hand: dark skin tone",
    "woman astronaut: light skin tone", "man cook: medium-dark skin tone", "ninja: medium-light skin tone",
    "mermaid", "red heart on a blue background", "pizza on a teal background", "cat face on a pink background",
    "rocket on a navy background", "rose on a yellow background", "panda on a light green background",
)  # fmt: skip


@dataclass(frozen=True)
class SampleSizes:
    """How much is drawn and written; the defaults are the figures' definition, less is a quick look.

    `steps` and `guidance` are emoji-xl's; emoji-z has its own.
    """

    captions: int = 500
    composed: int = 160
    expansions: int = 200
    steps: int = 20
    guidance: float = 4.0
    sheet: int = 64


class PictureGenerator:
    """The stock pipeline over an exported folder: draws captions, each from its own seed."""

    def __init__(self, run: TrainingRun, name: str, steps: int, guidance: float) -> None:
        from diffusers import DiffusionPipeline

        # 16 bits are how the weights are kept; a CPU computes in float32.
        dtype = torch.float32 if not run.on_gpu else torch.float16 if name.startswith("emoji-xl") else torch.bfloat16
        pipeline: Any = DiffusionPipeline.from_pretrained(run.models / name, dtype=dtype, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = pipeline.to(run.device)
        self.steps, self.guidance = steps, guidance
        self.chunk = 250 if run.on_gpu else CHUNK
        self.side = run.size

    def draw(self, texts: list[str]) -> torch.Tensor:
        """Pictures [B, 3, H, W] in -1..1 on the CPU, at the run's size."""
        found = []
        for start in range(0, len(texts), self.chunk):
            part = texts[start : start + self.chunk]
            seeds = [torch.Generator("cpu").manual_seed(SEED + start + n) for n in range(len(part))]
            made = self.pipeline(
                prompt=part,
                height=self.side,
                width=self.side,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                generator=seeds,
                output_type="pt",
            ).images
            found.append(made.float().cpu() * 2 - 1)
        return torch.cat(found)

    @torch.no_grad()
    def codec_psnr(self, true: torch.Tensor) -> float:
        """Mean PSNR in dB of pictures [N, 3, H, W] in -1..1 that its autoencoder encodes and decodes."""
        codec, found = self.pipeline.vae, []
        for part in true.split(self.chunk):
            pixels = part.to(codec.device, codec.dtype)
            made = codec.decode(codec.encode(pixels).latent_dist.mean).sample.float().clamp(-1, 1)
            found.append(-10 * ((made - pixels.float()).square().mean(dim=(1, 2, 3)) / 4).log10().cpu())
        return float(torch.cat(found).mean())


class FeatureExtractor:
    """An exported `emoji-clip`: features of pictures and captions."""

    def __init__(self, run: TrainingRun) -> None:
        from transformers import AutoTokenizer, CLIPModel

        folder = run.models / "emoji-clip"
        self.model: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model = self.model.to(run.device).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.side: int = self.model.config.vision_config.image_size
        self.device = run.device

    @torch.no_grad()
    def read(self, texts: list[str]) -> torch.Tensor:
        """Unit features [N, D] of captions."""
        found = []
        for start in range(0, len(texts), 512):
            ids = self.tokenizer(
                texts[start : start + 512], padding=True, truncation=True, return_tensors="pt"
            ).input_ids.to(self.device)
            pooled = self.model.text_model(input_ids=ids).pooler_output
            found.append(F.normalize(self.model.text_projection(pooled), dim=-1).cpu())
        return torch.cat(found)

    @torch.no_grad()
    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """Unit features [N, D] of pictures [N, 3, H, W] in -1..1."""
        found = []
        for start in range(0, len(pixels), 512):
            part = pixels[start : start + 512].to(self.device)
            if part.shape[-1] != self.side:
                part = F.interpolate(part, size=self.side, mode="bilinear", antialias=True)
            pooled = self.model.vision_model(pixel_values=part).pooler_output
            found.append(F.normalize(self.model.visual_projection(pooled), dim=-1).cpu())
        return torch.cat(found)


def small(pixels: torch.Tensor) -> torch.Tensor:
    """Pictures as float32 [N, 3 * 32 * 32] for plain RGB distance."""
    return F.interpolate(pixels.float(), size=SIDE, mode="area").flatten(1)


def nearest(made: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Row numbers in `true` [N, D] of the nearest neighbours of `made` [B, D]."""
    # By differences: the faster expansion loses the digits that tell near-equal pictures apart.
    return torch.cdist(made, true, compute_mode="donot_use_mm_for_euclid_dist").argmin(dim=1)


def border(pixels: torch.Tensor) -> torch.Tensor:
    """Median of the outermost pixels, a thirty-second of the side wide: [N, C, H, W] to [N, C]."""
    wide = max(1, pixels.shape[-1] // 32)
    inner = torch.zeros(pixels.shape[-2:], dtype=torch.bool)
    inner[wide:-wide, wide:-wide] = True
    return pixels[:, :, ~inner].median(dim=2).values


def judge_clip(run: TrainingRun) -> dict[str, Any]:
    """How `emoji-clip` ranks the names of the real pictures on white; held-out variants counted apart."""
    rows = pictures.read_rows(run.data)
    true = _on_white(run, rows)
    reader = FeatureExtractor(run)
    rank = _ranks(reader.see(true), reader.read([row.name for row in rows]), list(range(len(rows))))
    hidden = torch.zeros(len(rows), dtype=torch.bool)
    hidden[sorted(captions.held_out(rows, run.held_out))] = True
    figures = {
        "real_pictures_caption_first": _share(rank[~hidden] == 0),
        "real_pictures_caption_top5": _share(rank[~hidden] < 5),
    }
    if hidden.any():
        figures["held_out_variants_caption_first"] = _share(rank[hidden] == 0)
    return figures


def judge_xl(run: TrainingRun, extent: SampleSizes) -> dict[str, Any]:
    """Draws with `emoji-xl`, compares with the true pictures, and writes four contact sheets to the stage's folder."""
    painter = PictureGenerator(run, "emoji-xl", extent.steps, extent.guidance)
    return {"steps": extent.steps, "guidance": extent.guidance} | _drawn(run, extent, painter, run.folder("judge"))


def judge_turbo(run: TrainingRun, extent: SampleSizes) -> dict[str, Any]:
    """The same with `emoji-xl-turbo`, in four steps without guidance; its sheets lie in a folder of their own."""
    painter = PictureGenerator(run, "emoji-xl-turbo", TURBO_STEPS, 1.0)
    folder = run.folder("judge") / "emoji-xl-turbo"
    return {"steps": TURBO_STEPS, "guidance": 1.0} | _drawn(run, extent, painter, folder)


def judge_zimage(run: TrainingRun, extent: SampleSizes) -> dict[str, Any]:
    """The same with `emoji-z`, in its eight steps without guidance; its sheets lie in a folder of their own."""
    painter = PictureGenerator(run, "emoji-z", STEPS, 0.0)
    return {"steps": STEPS, "guidance": 0.0} | _drawn(run, extent, painter, run.folder("judge") / "emoji-z")


def _drawn(run: TrainingRun, extent: SampleSizes, painter: PictureGenerator, folder: Path) -> dict[str, Any]:
    """Figures of what `painter` draws; contact sheets go to `folder`."""
    rows = pictures.read_rows(run.data)
    images = pictures.read_pictures(run.data, rows, run.size)
    true = pictures.composite(images, torch.ones(len(rows), 3))
    small_true = small(true)
    hidden = captions.held_out(rows, run.held_out)
    known = [index for index in range(len(rows)) if index not in hidden]
    draw = random.Random(SEED)
    asked = draw.sample(known, min(extent.captions, len(known)))
    figures: dict[str, Any] = {"captions": len(asked)}

    made = painter.draw([rows[index].name for index in asked])
    found = nearest(small(made), small_true).tolist()
    right = [_base(rows[a].name) == _base(rows[f].name) for a, f in zip(asked, found, strict=True)]
    figures["nearest_neighbour_has_the_name"] = _share(torch.tensor(right))
    figures |= _clip_figures(run, rows, made, asked)
    figures["autoencoder_psnr_db"] = painter.codec_psnr(true[asked])
    pairs = [image for a, m in zip(asked[:32], made[:32], strict=True) for image in (true[a], m)]
    sheet.save(
        folder / "asked.png",
        pictures.to_images(torch.stack(pairs)),
        [rows[a].name for a in asked[:32] for _ in "01"],
    )

    # Where a picture reaches the border there is no background to look at.
    open_ = (border(images[:, 3:].float()) < 0.1 * 255).squeeze(1)
    figures |= _composition(rows, painter, [i for i in known if open_[i]], extent.composed, draw, folder)
    if hidden:
        figures |= _tones(rows, painter, true, sorted(hidden), folder)
    shown = list(SHOWN)[: extent.sheet]
    sheet.save(folder / "sheet.png", pictures.to_images(painter.draw(shown)), shown)
    return figures


def _clip_figures(
    run: TrainingRun, rows: list[pictures.PictureRow], made: torch.Tensor, asked: list[int]
) -> dict[str, Any]:
    if not (run.models / "emoji-clip" / "config.json").exists():
        return {}
    reader = FeatureExtractor(run)
    rank = _ranks(reader.see(made), reader.read([row.name for row in rows]), asked)
    return {"clip_ranks_caption_first": _share(rank == 0), "clip_ranks_caption_top5": _share(rank < 5)}


def _composition(
    rows: list[pictures.PictureRow],
    painter: PictureGenerator,
    known: list[int],
    count: int,
    draw: random.Random,
    folder: Path,
) -> dict[str, Any]:
    """Whether the border has the asked colour: it must be the nearest of the palette's colours."""
    palette = torch.tensor(list(captions.COLOURS.values())) / 255
    asked = [draw.choice(known) for _ in range(count)]
    colours = [draw.randrange(len(palette)) for _ in range(count)]
    texts = [
        captions.with_background(rows[a].name, captions.COLOUR_NAMES[c]) for a, c in zip(asked, colours, strict=True)
    ]
    made = painter.draw(texts)
    seen = (border(made) + 1) / 2
    exact = torch.cdist(seen, palette).argmin(1) == torch.tensor(colours)
    error = (seen - palette[colours]).abs().mean()
    sheet.save(folder / "composed.png", pictures.to_images(made[:64]), texts[:64])
    return {
        "background_is_nearest_of_16_colours": _share(exact),
        "background_mean_error_of_255": float(error * 255),
    }


def _tones(
    rows: list[pictures.PictureRow], painter: PictureGenerator, true: torch.Tensor, hidden: list[int], folder: Path
) -> dict[str, Any]:
    """Held-out variants: the nearest of the same base's true pictures, all tones and none, must have the asked tone."""
    by_base: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_base.setdefault(_base(row.name), []).append(index)
    made = painter.draw([rows[index].name for index in hidden])
    right = []
    for index, one in zip(hidden, small(made), strict=True):
        family = by_base[_base(rows[index].name)]
        right.append(family[int(nearest(one[None], small(true[family]))[0])] == index)
    pairs = [image for index, m in zip(hidden, made, strict=True) for image in (true[index], m)]
    names = [rows[index].name for index in hidden for _ in "01"]
    sheet.save(folder / "tones.png", pictures.to_images(torch.stack(pairs)), names)
    return {"held_out_variants": len(hidden), "held_out_tone_right": _share(torch.tensor(right))}


def _on_white(run: TrainingRun, rows: list[pictures.PictureRow]) -> torch.Tensor:
    images = pictures.read_pictures(run.data, rows, run.size)
    return pictures.composite(images, torch.ones(len(rows), 3))


def _ranks(seen: torch.Tensor, read: torch.Tensor, asked: list[int]) -> torch.Tensor:
    """How many captions score higher than the asked one, per picture."""
    scores = seen @ read.T
    own = scores[torch.arange(len(asked)), torch.tensor(asked)]
    return (scores > own[:, None]).sum(1)


def _base(name: str) -> str:
    return captions.split_tone(name)[0]


def _share(right: torch.Tensor) -> float:
    return float(right.float().mean())
