"""Writes captions of scenes for `diptych evaluate --prompts`, by family, and true pictures of what they say.

    python -m training.scene_prompts --data DATA --work WORK --out scenes.tsv
    python -m training.scene_prompts --data DATA --work WORK --unseen --out models/emoji-xl/unseen.tsv --real real

The second wrote the file that ships. `--real` gets two folders of pictures, `own` and `other`, which differ in all that
captions leave open; the distance between them, which is printed, is that of two halves of the real pictures.
"""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import torch

from evaluation.fid import FrechetDistance
from training import pictures
from training.judge_pictures import FeatureExtractor
from training.render import Renderer, pack
from training.run import TrainingRun, from_options, parser
from training.scenes import HELD_SHARES, Composer, Prompt
from training.stream import World


def groups(run: TrainingRun, composer: Composer, count: int, *, unseen: bool = False) -> dict[str, list[Prompt]]:
    """`count` prompts of each kind of family, held out and (not with `unseen`) trained on, by the groups' names."""
    return {
        f"{kind}_{'seen' if seen else 'held_out'}": composer.prompts(kind, count, seen=seen, size=(run.size, run.size))
        for kind in HELD_SHARES
        for seen in ((False,) if unseen else (False, True))
    }


def table(found: dict[str, list[Prompt]], *, in_turns: bool = False) -> str:
    """Columns id (NAME-NUMBER) and caption; group by group, or `in_turns` the first of each, then the second ones."""
    rows = [[f"{name}-{number}\t{one.caption}\n" for number, one in enumerate(group)] for name, group in found.items()]
    ordered = chain.from_iterable(zip(*rows, strict=True) if in_turns else rows)
    return "id\tcaption\n" + "".join(ordered)


def true_pictures(
    composer: Composer, renderer: Renderer, name: str, prompts: list[Prompt], size: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Two pictures of each prompt's truth, [N, 3, H, W] in -1..1: of the scene it comes from, and of another one."""
    draws = [random.Random(f"other {name} {number}") for number in range(len(prompts))]
    others = [composer.show(prompt.truth, draw, size) for prompt, draw in zip(prompts, draws, strict=True)]
    scenes = {"own": [prompt.scene for prompt in prompts], "other": others}
    return {half: renderer.draw(pack(found)).cpu() for half, found in scenes.items()}


def write_real(run: TrainingRun, world: World, found: dict[str, list[Prompt]], folder: Path) -> float | None:
    """Writes the true pictures and returns FID by emoji-clip between both sets; None without an emoji-clip."""
    renderer = Renderer(world.images, run.device)
    reader = FeatureExtractor(run) if (run.models / "emoji-clip" / "config.json").exists() else None
    seen: dict[str, list[torch.Tensor]] = {"own": [], "other": []}
    for name, prompts in found.items():
        for half, pixels in true_pictures(world.composer, renderer, name, prompts, (run.size, run.size)).items():
            (folder / half).mkdir(parents=True, exist_ok=True)
            for number, image in enumerate(pictures.to_images(pixels)):
                image.save(folder / half / f"{name}-{number}.png")
            if reader is not None:
                seen[half].append(reader.see(pixels))
    return FrechetDistance(torch.cat(seen["other"]))(torch.cat(seen["own"])) if reader is not None else None


def main() -> None:
    """`python -m training.scene_prompts --count N --out FILE [--unseen] [--real DIR]`."""
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=150, help="prompts of each kind")
    options.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table of captions, a .tsv")
    options.add_argument("--unseen", action="store_true", help="only families that training never saw, kinds in turns")
    options.add_argument("--real", type=Path, metavar="DIR", help="write also two sets of true pictures")
    given = options.parse_args()
    run = from_options(given)
    world = World.read(run)
    found = groups(run, world.composer, given.count, unseen=given.unseen)
    given.out.write_text(table(found, in_turns=given.unseen), encoding="utf-8")
    if given.real is not None:
        between = write_real(run, world, found, given.real)
        print(f"{given.real}: FID between own and other by emoji-clip: {between}")


if __name__ == "__main__":
    main()
