"""`diptych evaluate mlperf`: MLPerf's text-to-image test as one command, from its files to the verdict."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import mlperf as loadgen
from cli.arguments import Commands, UsageError, add_command, add_model, model_errors, read_settings

if TYPE_CHECKING:
    from evaluation.mlperf_files import FileCheck

_ABOUT = """DIR of --files holds, under their published names,

  captions_source.tsv, latents.npy, val2014.npz    of github.com/mlcommons/inference, text_to_image
  pt_inception-2015-12-05-6726825d.pth             of github.com/mseitzer/pytorch-fid
  clip-vit-base-patch32/                           of huggingface.co/openai
  stable-diffusion-xl-base-1.0/                    of huggingface.co/stabilityai, or its sd_xl_base_1.0.safetensors

All of it is checked before anything is drawn, and everything that is missing or wrong is told at once; --check ends
there. Then all 5,000 pictures are drawn and scored, and LoadGen's Offline test measures their speed. The same command
goes on where it was stopped. --stand-ins is a dry run: what is missing is replaced by seeded random content of its
shape, and there is no verdict.

  diptych evaluate mlperf --files mlperf --precision int8 --out mlperf-int8
  diptych evaluate mlperf --stand-ins --model random:sdxl --limit 16 --out dry-run

exit codes: 0 within both ranges and VALID, or a dry run; 1 outside or INVALID; 2 the input cannot be used
"""
_MODEL_OPTIONS = ("variant", "precision", "backend", "tiny_vae", "unet", "deepcache", "threads")
_BYTES_A_PICTURE = 2**21  # at least, of PNGs of 1024 x 1024
_DRY = {"--duration": "1", "--queries": "1"}

Arguments = Callable[[argparse.ArgumentParser], None]


def add(commands: Commands, evaluation: Arguments) -> None:
    """`evaluation` adds the arguments of `diptych evaluate`."""
    parser = add_command(
        commands,
        "mlperf",
        "MLPerf's test from its files to the verdict",
        "Check the files of MLPerf's text-to-image test, draw and score its pictures, measure their speed.",
        _ABOUT,
    )
    parser.add_argument("--files", type=Path, default=Path("mlperf"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="for runs, logs and the verdict")
    parser.add_argument("--check", action="store_true", help="only look at the files")
    parser.add_argument("--stand-ins", action="store_true", help="a dry run: replace what is missing")
    parser.add_argument("--limit", type=int, metavar="N", help="of a dry run: so many captions; default: 8")
    parser.add_argument("--target-qps", type=float, metavar="X", help="LoadGen's; default: the speed of the drawing")
    parser.add_argument("--resamples", type=int, default=20, metavar="N", help="for intervals; default: %(default)s")
    parser.add_argument(
        "--base", metavar="NAME", help="an SDXL folder or hub id, for the configs that a model of one file lacks"
    )
    add_model(parser)
    parser.set_defaults(run=lambda options: _test(options, evaluation), compile=None)


def _test(options: argparse.Namespace, evaluation: Arguments) -> int:
    from rich.console import Console

    console = Console(stderr=True)
    if options.limit is not None and (not options.stand_ins or options.limit < 2):
        raise UsageError("--limit: is of a dry run (--stand-ins), and at least 2")
    with console.status("looking at the files"):
        checks = _looked_at(options)
    _refuse(options, checks)
    for check in checks:
        print(check.line)
    if options.check:
        return 0
    files = {check.name: check.path for check in checks}
    stand_ins = [check.name for check in checks if check.stand_in]
    model = _folder_of(files, options)
    scores = _accuracy(options, evaluation, files, model, stand_ins)
    offline = _offline(options, files, model, scores["pictures_per_second"])
    return _verdict(options.out, checks, scores, offline)


def _looked_at(options: argparse.Namespace) -> list[FileCheck]:
    """The files, and in a dry run the stand-ins of those that are missing."""
    from evaluation import mlperf_files, stand_ins

    model = options.model
    if options.stand_ins and model is None:
        model_path = Path(mlperf_files.model_of(options.files, None))
        model = options.model = None if model_path.exists() else _stand_in_model()
    checks = mlperf_files.check_all(options.files, model, options.variant, stand_ins=options.stand_ins)
    if not options.stand_ins:
        return checks
    stand_in_folder = options.out / "stand-ins"
    side = stand_ins.latent_side(mlperf_files.model_of(options.files, model))
    for number, check in enumerate(checks):
        missing = check.wrong == mlperf_files.MISSING and check.name != mlperf_files.MODEL_FOLDER
        other = check.name == mlperf_files.LATENT and not check.wrong and side != mlperf_files.LATENT_SIDE
        if missing or other:
            model_name = mlperf_files.model_of(options.files, model)
            path = stand_ins.make(check.name, stand_in_folder, model=model_name, captions=options.limit or 8)
            checks[number] = check._replace(path=path, wrong="", stand_in=True, digest="")
    return checks


def _stand_in_model() -> str:
    import torch

    from pipeline.checkpoints import sdxl, tiny

    return sdxl.NAME if torch.cuda.is_available() else tiny.TINY


def _refuse(options: argparse.Namespace, checks: Iterable[FileCheck]) -> None:
    """Raise `UsageError` with all that is missing or wrong, files and machine."""
    wrong = [check.line for check in checks if check.wrong]
    if importlib.util.find_spec("mlperf_loadgen") is None:
        wrong.append("LoadGen: is not installed; pip install mlcommons-loadgen")
    settings = read_settings(options, compile=False)
    try:
        from workers.build_images import precision
        from workers.devices import device_of

        with model_errors():
            precision(
                settings.model_copy(update={"model_name": options.model or settings.model_name}), device_of(settings)
            )
    except UsageError as error:
        wrong.append(f"--precision: {error}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        needed = 0 if options.stand_ins else 5000 * _BYTES_A_PICTURE
        if (free := shutil.disk_usage(options.out).free) < needed:
            wrong.append(f"--out: {free / 2**30:.1f} GiB are free there, {needed / 2**30:.1f} are needed")
    except OSError as error:
        wrong.append(f"--out: cannot be made ({error.strerror})")
    if wrong:
        raise UsageError("\n  ".join([f"{len(wrong)} of what MLPerf's test needs cannot be used:", *wrong]))


def _folder_of(files: dict[str, Path], options: argparse.Namespace) -> str:
    """The model as the engine takes it: of a checkpoint in one file a folder is made, once."""
    from evaluation.mlperf_files import MODEL_FOLDER

    path = files[MODEL_FOLDER]
    if not path.is_file():
        return str(path)
    folders: Path = options.out / "model" / MODEL_FOLDER
    if not folders.is_dir():
        from pipeline.checkpoints import single_file

        folders.parent.mkdir(parents=True, exist_ok=True)
        with model_errors():
            single_file.convert(path, folders, single_file.CheckpointOptions(options.base or "", None, None, ""))
    return str(folders)


def _words(options: argparse.Namespace, files: dict[str, Path], model: str) -> list[str]:
    """Arguments that drawing and LoadGen share."""
    from evaluation import mlperf_files

    words = ["--prompts", str(files[mlperf_files.CAPTIONS]), "--latent", str(files[mlperf_files.LATENT])]
    words += ["--model", model]
    if options.stand_ins:
        words += ["--limit", str(options.limit or 8)]
    for name in _MODEL_OPTIONS:
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _accuracy(
    options: argparse.Namespace, evaluation: Arguments, files: dict[str, Path], model: str, stand_ins: list[str]
) -> dict[str, Any]:
    """The content of `scores.json` of all pictures, drawn and scored unless that is done."""
    from evaluation import mlperf_files

    out = options.out / "accuracy"
    if not (out / "scores.json").is_file():
        words = [*_words(options, files, model), "--out", str(out), "--protocol", "mlperf", "--lens", "mlperf"]
        words += ["--inception", str(files[mlperf_files.WEIGHTS]), "--clip", str(files[mlperf_files.CLIP])]
        words += ["--against", str(files[mlperf_files.STATISTICS]), "--resamples", str(options.resamples)]
        arguments = _read(evaluation, words)
        arguments.stand_ins = stand_ins
        if arguments.run(arguments):
            raise UsageError("some pictures failed; the same command tries again")
    scores: dict[str, Any] = json.loads((out / "scores.json").read_text("utf-8"))
    return scores


def _offline(options: argparse.Namespace, files: dict[str, Path], model: str, speed: float | None) -> dict[str, Any]:
    """The content of `mlperf.json` of LoadGen's Offline test, run unless that is done."""
    done = sorted(options.out.glob("offline-*/mlperf.json"))
    if not done:
        previous = len(list(options.out.glob("offline-*")))  # of tests that were stopped: LoadGen takes new folders
        out = options.out / f"offline-{previous}"
        words = [*_words(options, files, model), "--scenario", "Offline", "--out", str(out)]
        words += ["--target-qps", str(options.target_qps or speed or 1.0)]
        if options.stand_ins:
            words += [word for pair in _DRY.items() for word in pair]
        arguments = _read(loadgen.add_arguments, words)
        arguments.run(arguments)
        done = [out / "mlperf.json"]
    result: dict[str, Any] = json.loads(done[-1].read_text("utf-8"))
    return result


def _read(arguments: Arguments, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments(parser)
    return parser.parse_args(words)


def _verdict(out: Path, checks: Iterable[FileCheck], scores: dict[str, Any], offline: dict[str, Any]) -> int:
    """Print and keep the verdict; returns the exit code."""
    from evaluation import mlperf
    from evaluation.run import write_json

    verdicts = mlperf.verdicts(scores)
    reasons = mlperf.unofficial(scores)
    within = all(check.within for check in verdicts)
    valid = bool(offline["valid"])
    word = f"none ({'; '.join(reasons)})" if reasons else "within" if within and valid else "OUTSIDE or INVALID"
    write_json(
        out / "verdict.json",
        {
            "files": [{"name": check.name, "sha256": check.digest, "stand_in": check.stand_in} for check in checks],
            "scores": [check._asdict() for check in verdicts], "pictures_per_second": scores["pictures_per_second"],
            "loadgen": offline, "drawn_by": scores["drawn_by"], "verdict": word,
        },
    )  # fmt: skip
    print(mlperf.table(scores))
    speed = scores["pictures_per_second"]
    print(f"images/s     {'–' if speed is None else format(speed, '.3f')} while they were drawn")
    print(f"LoadGen      Offline {'VALID' if valid else 'INVALID'}" + (" (shortened)" if offline["shortened"] else ""))
    print(f"verdict      {word}")
    print(out / "verdict.json", flush=True)
    return 0 if reasons or (within and valid) else 1
