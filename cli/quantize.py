"""`diptych quantize`: writes a model's quantized variant, calibrated on prompts if the scheme wants it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import (
    Commands,
    StartupProgress,
    UsageError,
    add_command,
    add_settings,
    check_range,
    model_errors,
    read_settings,
    wrong_option,
)
from contract.errors import Invalid
from contract.precision import GPTQ_SCHEMES, IMAGE_SCHEMES, SCHEMES, is_calibrated

if TYPE_CHECKING:
    from core.config import Settings
    from core.quant.convert import QuantizationReport
    from pipeline.checkpoints.load import ImageModel

_ABOUT = """The variant goes into DIR as unet-int8 and vae-int8 (unet-fp8). `--precision int8` finds it where DIR is the
model's own folder, and else with `--unet DIR/unet-int8`. Without -o it goes into the cache, where `--precision int8`
and `auto` find it; `--precision int8` does the same by itself with a model that has no variant. A calibration that
was stopped goes on where it was, with the same model, prompts and DIR.
"""
_LIMIT = 64
_CALIBRATION = ("prompts", "limit", "alpha", "plain", "search", "sensitivity", "gptq")
_OWN = (*_CALIBRATION, "scales_only", "keep")  # of a variant that is looked for nowhere else than in DIR


def add(commands: Commands) -> None:
    quantize = add_command(
        commands,
        "quantize",
        "make a model's variant in 8 bits, or a language model's in 4",
        "Watch a model draw prompts, or read them, then write its layers in 8 bits or 4.",
        _ABOUT,
    )
    quantize.add_argument(
        "--model", metavar="NAME", help="a folder in diffusers' format or a hub id; default: the embedded model"
    )
    quantize.add_argument(
        "--text-model",
        metavar="NAME",
        help="a language model instead: DIR then gets its model-int8 (model-SCHEME)",
    )
    quantize.add_argument(
        "--control",
        metavar="NAME",
        help="a control network of the folder instead, of this model: NAME-int8 (NAME-fp8) is written beside it",
    )
    add_settings(quantize, "variant", "threads", "control_dir")
    quantize.add_argument("--scheme", choices=SCHEMES, default="int8", help="default: %(default)s")
    quantize.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="to calibrate on: one a line, or a .tsv, .csv, .json, .jsonl; default: 64 captions in the code",
    )  # fmt: skip
    quantize.add_argument("--limit", type=int, metavar="N", help="only the first N prompts; default: 64")
    quantize.add_argument("-o", "--out", type=Path, metavar="DIR", help="for the variant; default: the cache")
    quantize.add_argument("--alpha", type=float, metavar="A", help="of SmoothQuant, 0 to 1; default: the recipe's")
    quantize.add_argument(
        "--plain", action="store_true", help="without smoothing: worse pictures, to see what smoothing brings"
    )
    quantize.add_argument(
        "--scales-only", action="store_true", help="write no weights: they are quantized anew whenever it is loaded"
    )
    quantize.add_argument(
        "--search", action="store_true",
        help="choose each layer's smoothing by the error of its output; all steps are watched",
    )  # fmt: skip
    quantize.add_argument(
        "--keep", metavar="PATTERN", help="layers to leave in floating point: a regular expression of whole names"
    )
    quantize.add_argument(
        "--gptq",
        action="store_true",
        help="round (of int8-sparse prune) integer weights so that they make up for one another; all steps are watched",
    )
    quantize.add_argument("--float-head", action="store_true", help="leave a language model's head in floating point")
    quantize.add_argument(
        "--sensitivity", action="store_true",
        help="write no variant but a table: what 8 bits in each layer alone cost, on 8 of the prompts",
    )  # fmt: skip
    quantize.set_defaults(run=_quantize)


def _quantize(options: argparse.Namespace) -> int:
    check_range(options, "limit", 1)
    check_range(options, "alpha", 0, 1)
    options_given = _given(options, _CALIBRATION)
    if options_given and not is_calibrated(options.scheme):
        raise UsageError(f"{options_given[0]}: is for calibration, and {options.scheme} needs none")
    if options.scheme not in IMAGE_SCHEMES and options.text_model is None:
        raise UsageError(f"--scheme: {options.scheme} is for language models, with --text-model")
    if options.float_head and options.text_model is None:
        raise UsageError("--float-head: is for language models, with --text-model")
    _check_layerwise(options)
    if options.text_model is not None:
        return _quantize_text(options, _prompts(options))
    if options.control is not None:
        return _quantize_control(options, _prompts(options))
    if options.out is None:
        return _into_cache(options)
    return _into_folder(options, _prompts(options))


def _check_layerwise(options: argparse.Namespace) -> None:
    """Reject options for single layers beside those that exclude them."""
    for other, refused in (
        ("text_model", ("keep", "sensitivity")),
        ("control", ("search", "keep", "sensitivity", "gptq")),
    ):
        used = _given(options, refused)
        if used and getattr(options, other) is not None:
            raise UsageError(f"{used[0]}: is for models that draw, not for --{other.replace('_', '-')}")
    excluded = {"--scales-only": options.scales_only, "--sensitivity": options.sensitivity}
    excluded[options.scheme] = options.scheme not in GPTQ_SCHEMES
    for other in (name for name, used in excluded.items() if used and options.gptq):
        raise UsageError(f"--gptq: rounds integer weights that are stored, and there are none with {other}")
    if options.search and (options.plain or options.alpha is not None):
        raise UsageError(
            f"--search: chooses the smoothing itself; leave out {'--plain' if options.plain else '--alpha'}"
        )


def into_own_folder(folder: Path, scheme: str, variant: str | None, limit: int | None, threads: int | None) -> int:
    """Quantize into a model's own folder, where `--precision int8` finds the variant; return the exit code."""
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    options = parser.parse_args(["quantize"])
    vars(options).update(model=str(folder), out=folder, scheme=scheme, variant=variant, limit=limit, threads=threads)
    return _into_folder(options, _prompts(options))


def _given(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Return those of these options that were given, as they are written."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False)]


def _prompts(options: argparse.Namespace) -> list[str]:
    """The first prompts of the file, or of the bundled ones; none for a scheme without calibration."""
    if not is_calibrated(options.scheme):
        return []
    from pipeline.text.prompts import PromptsError, read

    limit = options.limit or _LIMIT
    if options.prompts is None:
        from pipeline.quantization.calibration import default_prompts

        return list(default_prompts()[:limit])
    try:
        return [prompt.text for prompt in read(options.prompts, limit)]
    except PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error


def _into_cache(options: argparse.Namespace) -> int:
    """Create the variant that `--precision int8` looks for, unless it exists."""
    from rich.console import Console

    options_given = _given(options, _OWN)
    if options_given:
        raise UsageError(f"--out: is needed with {options_given[0]}: in the cache all is as by default")
    settings = read_settings(options)
    with model_errors(), StartupProgress(Console(stderr=True)) as starting:
        from contract.precision import unquantized
        from workers import variants
        from workers.build_images import precision, unquantized_model
        from workers.devices import device_of

        device = device_of(settings)
        precision(settings.model_copy(update={"precision": options.scheme}), device)  # rejects what does not run here
        place = variants.cached(settings, device, options.scheme, unquantized(device))
        was_made = place.exists
        if not was_made:
            opened = partial(unquantized_model, settings, options.scheme)
            variants.quantize_into(place, settings, opened, starting.say, starting.count)
    print(f"{place.folder} {'was there already' if was_made else 'is made'}; --precision {options.scheme} takes it")
    return 0


def _into_folder(options: argparse.Namespace, prompts: list[str]) -> int:
    """Write the variant, or print what 8 bits in each layer cost."""
    settings = read_settings(options)
    with _quantizing(options.scheme, options.out, len(prompts)) as tell:
        from pipeline.quantization import quantized, sensitivity
        from workers.devices import kernels

        model = _unquantized(settings)
        shared: dict[str, Any] = {
            "scheme": options.scheme, "alpha": options.alpha, "plain": options.plain,
            "layerwise": quantized.Layerwise(options.search, options.keep, options.gptq),
            "kernels": kernels(settings, model)[0], "tell": tell,
        }  # fmt: skip
        if options.sensitivity:
            table, reports = sensitivity.report(model, prompts, options.out, **shared), {}
        else:
            table = None
            reports = quantized.make(model, prompts, options.out, weights=not options.scales_only, **shared)
    if table is not None:
        print(table)
    for part, (report, size_bytes) in reports.items():
        _print(part, options.scheme, report, size_bytes)
    return 0


def _quantize_control(options: argparse.Namespace, prompts: list[str]) -> int:
    """Quantize a control network of the model."""
    settings = read_settings(options)
    if not settings.control_dir:
        raise UsageError("--control-dir: must name the folder of --control")
    folder = Path(settings.control_dir).expanduser()
    out = options.out or folder
    with _quantizing(options.scheme, out, len(prompts)) as tell:
        from pipeline.extensions import control_file
        from pipeline.quantization.control_quantized import make
        from workers.devices import kernels

        path = control_file.find(folder, options.control)
        model = _unquantized(settings)
        report, size_bytes = make(
            model, options.control, path, prompts, out, scheme=options.scheme,
            alpha=options.alpha, plain=options.plain,
            weights=not options.scales_only, kernels=kernels(settings, model)[0], tell=tell,
        )  # fmt: skip
    _print(options.control, options.scheme, report, size_bytes)
    return 0


def _unquantized(settings: Settings) -> ImageModel:
    """The model in the precision stored in its folder: the environment's settings for serving do not apply."""
    from contract.precision import unquantized
    from workers.build_images import load_model
    from workers.devices import device_of

    precision = unquantized(device_of(settings))
    return load_model(settings.model_copy(update={"precision": precision, "unet": ""}))


def _print(title: str, scheme: str, report: QuantizationReport, size_bytes: int) -> None:
    left = len(report.skipped)
    print(f"{title}: {len(report.changed)} layers in {scheme}, {left} left as they were, {size_bytes} bytes")


@contextmanager
def _quantizing(scheme: str, out: Path, count: int) -> Iterator[Callable[[int], None]]:
    """Shows the progress of a calibration on `count` prompts; errors become the command line's."""
    from rich.console import Console

    from core.quant.convert import RecipeError
    from core.quant.statistics import StatisticsError
    from core.quant.store import QuantizedStoreError

    try:
        with model_errors(), StartupProgress(Console(stderr=True)) as starting:
            try:
                yield lambda done: starting.count(f"quantizing to {scheme}", done, count)
            except Invalid as error:
                raise wrong_option(error) from error
    except (StatisticsError, RecipeError, QuantizedStoreError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--out: {out} cannot be written ({error.strerror})") from error


def _quantize_text(options: argparse.Namespace, prompts: list[str]) -> int:
    """Quantize a text model: prompts are read as plain texts."""
    from core.quant.convert import RecipeError
    from core.quant.statistics import StatisticsError
    from core.quant.store import QuantizedStoreError
    from llm.checkpoints.load import TextModelError, load
    from llm.checkpoints.quantized import Layerwise, make
    from llm.families.recipe import llama

    if options.out is None:
        raise UsageError("--out: is needed with --text-model: the folder of its model, or another")
    if options.scales_only:
        raise UsageError("--scales-only: is for models that draw; a --text-model is written with its weights")
    recipe = None if options.alpha is None else llama(options.alpha)  # None: the scheme's own
    recipe = llama(None) if options.plain else recipe
    try:
        model = load(options.text_model)
        start = model.tokenizer.bos_token_id
        texts = [model.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in prompts]
        texts = [([] if start is None else [start]) + text for text in texts]
        texts = [text[: model.context] for text in texts]
        layerwise = Layerwise(options.search, options.gptq, head=not options.float_head)
        report = make(model, texts, options.out, recipe=recipe, scheme=options.scheme, layerwise=layerwise)
    except TextModelError as error:
        raise UsageError(f"--text-model: {error}") from error
    except (StatisticsError, RecipeError, QuantizedStoreError) as error:
        raise UsageError(str(error)) from error
    print(f"text: {len(report.changed)} layers in {options.scheme}, {len(report.skipped)} left as they were")
    return 0
