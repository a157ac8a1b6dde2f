"""Shared by the commands that score: options of the networks, and early checks of references."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import CommandFailed, UsageError, check_range

if TYPE_CHECKING:
    from rich.console import Console

    from core.config import Settings
    from evaluation.run import EvaluationRun
    from evaluation.scoring_networks import ScoringNetworks


def add_scoring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lens", metavar="NAME",
        help="what looks at the pictures: emoji-clip, mlperf (Inception and OpenAI's ViT-B/32), or a CLIP folder; "
        "default: emoji-clip for the embedded model, else mlperf",
    )  # fmt: skip
    parser.add_argument("--inception", type=Path, metavar="FILE", help="its weights; default: fetched and kept")
    parser.add_argument("--clip", type=Path, metavar="DIR", help="ViT-B/32 in transformers' format; default: fetched")
    parser.add_argument("--lpips", type=Path, metavar="FILE", help="torchvision's AlexNet; default: no LPIPS")
    parser.add_argument(
        "--judge", action="append", default=[], metavar="FIGURE=DIR",
        help="a further figure, over a folder with its weights: fd-dinov2, cmmd, pickscore, hpsv2, imagereward, hpsv3, "
        "or what another package adds, such as scenes; may be given more than once",
    )  # fmt: skip
    parser.add_argument("--resamples", type=int, default=200, metavar="N", help="of the bootstrap; default: 200")


def open_lens(
    options: argparse.Namespace, settings: Settings | None, run: EvaluationRun | None = None
) -> ScoringNetworks:
    from evaluation.judges import open_judge
    from evaluation.lpips import Lpips

    check_range(options, "resamples", 2)
    folders = _judges(options.judge)
    networks = _networks(options, settings, run)
    lpips = None if options.lpips is None else Lpips(options.lpips)
    return networks._replace(lpips=lpips, judges=tuple(open_judge(*folder) for folder in folders.items()))


def _judges(texts: list[str]) -> dict[str, Path]:
    """The folders by figure. Raises `UsageError`."""
    from evaluation.judges import figures

    known = figures() if texts else []
    folders: dict[str, Path] = {}
    for text in texts:
        figure, _, folder = text.partition("=")
        if figure not in known or not folder:
            raise UsageError(f"--judge: must be one of {', '.join(known)}, with =DIR, not {text!r}")
        if figure in folders:
            raise UsageError(f"--judge: names {figure} twice")
        folders[figure] = Path(folder)
    return folders


def _networks(options: argparse.Namespace, settings: Settings | None, run: EvaluationRun | None) -> ScoringNetworks:
    from evaluation import scoring_networks as lenses

    name = options.lens
    if name is None:
        name = lenses.EMOJI if _embedded(options, settings, run) else lenses.MLPERF
    if name == lenses.MLPERF:
        return lenses.mlperf(options.inception, options.clip)
    if name == lenses.EMOJI:
        return lenses.embedded()
    if not Path(name).is_dir():
        raise UsageError(f"--lens: must be emoji-clip, mlperf, or a folder with a CLIP model, not {name!r}")
    return lenses.embedded(Path(name))


def _embedded(options: argparse.Namespace, settings: Settings | None, run: EvaluationRun | None) -> bool:
    from core.config import EMBEDDED_MODEL, STAND_IN_MODEL

    if run is not None:
        return (run.drawn_by.get("model") or "") in (EMBEDDED_MODEL.name, STAND_IN_MODEL)
    assert settings is not None
    if options.server:
        return options.model in (None, EMBEDDED_MODEL.name)
    return settings.model_name == STAND_IN_MODEL or Path(settings.model_name).resolve() == EMBEDDED_MODEL.resolve()


def try_references(paths: list[Path], lens: ScoringNetworks) -> None:
    """Reject references before hours are spent, as far as possible without reading images."""
    from evaluation import fid, pixels, references
    from evaluation.run import EvaluationRun

    names = [path.resolve().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise UsageError(f"--against: two references are called {name!r}")
        match references.kind(path):
            case "run":
                EvaluationRun.read(path)
            case "statistics":
                fid.read(path, lens.distance.width)
            case _:
                pixels.listing(path)


@contextlib.contextmanager
def scoring_errors() -> Iterator[None]:
    from evaluation.fid import FidStatisticsError
    from evaluation.inception import WeightsError
    from evaluation.pixels import PictureError
    from evaluation.references import UnusableReference
    from evaluation.run import RunError
    from evaluation.sources import SourceError

    try:
        yield
    except (RunError, PictureError, FidStatisticsError, UnusableReference, WeightsError) as error:
        raise UsageError(str(error)) from error
    except SourceError as error:
        raise CommandFailed(f"--server: {error}") from error
    except OSError as error:
        raise UsageError(f"{error.filename or '--out'}: cannot be written or read ({error.strerror})") from error


def score(run: EvaluationRun, options: argparse.Namespace, lens: ScoringNetworks, console: Console) -> int:
    from evaluation import compare, generate, mlperf, pixels, references, report, scores
    from evaluation.run import write_json

    with generate.bars(console) as progress:
        look = looking(progress)
        cache = run.folder / "references"
        looks = [
            references.look(path, lens, cache, partial(look, f"looking at {path.name}")) for path in options.against
        ]
        figures = scores.score_run(run, lens, looks, resamples=options.resamples, look=look)
    speed = run.speed()
    document = {
        "lens": lens.name, "pictures": len(run.captions), "side": min(pixels.read(run.files()[0]).shape[:2]), **figures,
        "pictures_per_second": None if speed is None else round(speed, 4),
        "settings": run.settings, "drawn_by": run.drawn_by,
    }  # fmt: skip
    if stand_ins := getattr(options, "stand_ins", []):
        document["stand_ins"] = stand_ins
    write_json(run.folder / "scores.json", document)
    (run.folder / "report.html").write_text(report.page(compare.of_one(run, lens, document), [run]), "utf-8")
    for note in document["notes"]:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    print(_table(document))
    if options.protocol:
        print(mlperf.table(document))
    print(run.folder / "report.html")
    print(run.folder / "scores.json", flush=True)
    return 0


def _table(document: dict[str, Any]) -> str:
    rows = [("", name, score) for name, score in document["scores"].items()]
    for reference, entries in document["against"].items():
        rows += [(f"against {reference}", name, score) for name, score in entries["scores"].items()]
        rows += [(f"less {reference}'s", name, change) for name, change in entries.get("changes", {}).items()]
    return "\n".join(
        f"{name:20} {score['value']:12.6g}   {score['low']:.6g} … {score['high']:.6g}   {cells}".rstrip()
        for cells, name, score in rows
    )


def looking(progress: Any) -> Any:
    tasks: dict[str, Any] = {}

    def look(title: str, done: int, total: int) -> None:
        if title not in tasks:
            tasks[title] = progress.add_task(title, total=total, completed=done)  # begun before: its rate is not known
        progress.update(tasks[title], completed=done)

    return look
