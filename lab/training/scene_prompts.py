"""Writes captions of scenes for `diptych evaluate --prompts`, by family, and true images of what they say.

    python -m lab.training.scene_prompts --data DATA --work WORK --out scenes.tsv
    python -m lab.training.scene_prompts --data DATA --work WORK --unseen --out models/emoji-xl/unseen.tsv --real real

The second wrote the file that ships. `--real` gets two folders of images, `own` and `other`, which differ in all that
captions leave open; the distance between them, which is printed, is that of two halves of the real images.
"""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

from evaluation import pixels
from evaluation.clip import Clip
from evaluation.fid import FrechetDistance
from lab.training.render import Renderer, images_of
from lab.training.run import TrainingRun, from_options, parser
from lab.training.scenes import HELD_SHARES, Composer, ScenePrompt
from lab.training.stream import World

HALVES = ("own", "other")


def groups(run: TrainingRun, composer: Composer, count: int, *, unseen: bool = False) -> dict[str, list[ScenePrompt]]:
    """`count` prompts of each kind of family, held out and (not with `unseen`) trained on, by the groups' names.

    A group has fewer where there are no more families.
    """
    return {
        f"{kind}_{'seen' if seen else 'held_out'}": composer.prompts(kind, count, seen=seen, size=(run.size, run.size))
        for kind in HELD_SHARES
        for seen in ((False,) if unseen else (False, True))
    }


def table(prompt_groups: dict[str, list[ScenePrompt]], *, in_turns: bool = False) -> str:
    """Columns id (NAME-NUMBER) and caption; group by group, or `in_turns` the first of each, then the second ones."""
    rows = [
        [f"{name}-{number}\t{prompt.caption}\n" for number, prompt in enumerate(group)]
        for name, group in prompt_groups.items()
    ]
    ordered = chain.from_iterable(zip(*rows, strict=True) if in_turns else rows)
    return "id\tcaption\n" + "".join(ordered)


def write_real(
    run: TrainingRun, world: World, prompt_groups: dict[str, list[ScenePrompt]], folder: Path
) -> float | None:
    """Write two true images of each prompt, of the scene that it comes from and of another one.

    Returns FID by emoji-clip between both sets; None without an emoji-clip.
    """
    renderer, size = Renderer(world.images, run.device), (run.size, run.size)
    for name, prompts in prompt_groups.items():
        draws = [random.Random(f"other {name} {number}") for number in range(len(prompts))]
        alternatives = [
            world.composer.show(prompt.truth, draw, size) for prompt, draw in zip(prompts, draws, strict=True)
        ]
        for half, scenes in zip(HALVES, ([prompt.scene for prompt in prompts], alternatives), strict=True):
            (folder / half).mkdir(parents=True, exist_ok=True)
            for number, image in enumerate(images_of(renderer, scenes)):
                image.save(folder / half / f"{name}-{number}.png")
    if not (run.models / "emoji-clip" / "config.json").exists():
        return None
    clip = Clip(run.models / "emoji-clip", device=run.device)
    features, other = (clip.see([pixels.read(path) for path in sorted((folder / half).iterdir())]) for half in HALVES)
    return FrechetDistance(other)(features)


def main() -> None:
    """`python -m lab.training.scene_prompts --count N --out FILE [--unseen] [--real DIR]`."""
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=150, help="prompts of each kind")
    options.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table of captions, a .tsv")
    options.add_argument("--unseen", action="store_true", help="only families that training never saw, kinds in turns")
    options.add_argument("--real", type=Path, metavar="DIR", help="write also two sets of true images")
    arguments = options.parse_args()
    run = from_options(arguments)
    world = World.read(run)
    prompt_groups = groups(run, world.composer, arguments.count, unseen=arguments.unseen)
    if short := [name for name, prompts in prompt_groups.items() if len(prompts) < arguments.count]:
        options.error(f"--count: {short[0]} has only {len(prompt_groups[short[0]])} families")
    arguments.out.write_text(table(prompt_groups, in_turns=arguments.unseen), encoding="utf-8")
    if arguments.real is not None:
        between = write_real(run, world, prompt_groups, arguments.real)
        print(f"{arguments.real}: FID between own and other by emoji-clip: {between}")


if __name__ == "__main__":
    main()
