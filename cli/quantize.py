"""`diptych quantize`: calibrates a model on prompts and writes its INT8 or FP8 variant.

Knows options and progress; leaves ranges, recipes and files to `pipeline.quantized`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.arguments import Commands, UsageError, model_errors, read_settings

_ABOUT = """The variant goes into DIR as unet-int8 and vae-int8 (unet-fp8). `--precision int8` finds it where DIR is the
model's own folder, and else with `--unet DIR/unet-int8`. A calibration that was stopped goes on where it was, with the
same model, prompts and DIR.
"""


def add(commands: Commands) -> None:
    quantize = commands.add_parser(
        "quantize",
        help="make a model's INT8 or FP8 variant",
        description="Watch a model draw prompts, then write its layers in 8 bits.",
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    quantize.add_argument(
        "--model", metavar="NAME", help="a folder in diffusers' format or a hub id; default: the embedded model"
    )
    quantize.add_argument(
        "--text-model", metavar="NAME", help="a language model instead: DIR then gets its model-int8 (model-fp8)"
    )
    quantize.add_argument("--variant", metavar="WORD", help="of the weight files, such as fp16")
    quantize.add_argument("--scheme", choices=("int8", "fp8"), default="int8", help="default: %(default)s")
    quantize.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="to calibrate on: one a line, or a .tsv/.csv"
    )
    quantize.add_argument("--limit", type=int, default=64, metavar="N", help="only the first N; default: %(default)s")
    quantize.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="for the variant")
    quantize.add_argument("--alpha", type=float, metavar="A", help="of SmoothQuant, 0 to 1; default: the recipe's")
    quantize.add_argument(
        "--plain", action="store_true", help="without smoothing: worse pictures, to see what smoothing brings"
    )
    quantize.add_argument(
        "--scales-only", action="store_true", help="write no weights: they are quantized anew whenever it is loaded"
    )
    quantize.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: one per core")
    quantize.set_defaults(run=_quantize)


def _quantize(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from core.quant.convert import RecipeError
    from core.quant.statistics import StatisticsError
    from core.quant.store import StoreError
    from pipeline.prompts import PromptsError, read
    from unet_opt.recipe import ALPHA

    if options.limit < 1:
        raise UsageError(f"--limit: must be at least 1, not {options.limit}")
    if options.alpha is not None and not 0 <= options.alpha <= 1:
        raise UsageError(f"--alpha: must be between 0 and 1, not {options.alpha:g}")
    try:
        prompts = [prompt.text for prompt in read(options.prompts, options.limit)]
    except PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error
    if options.text_model is not None:
        return _quantize_text(options, prompts)
    settings = read_settings(options, precision="fp32")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with model_errors(), Progress(*columns, console=console) as progress:
            from pipeline.quantized import make
            from workers.build import load_model

            bars = {part: progress.add_task(f"watching the {part}", total=len(prompts)) for part in ("unet", "vae")}
            alpha = None if options.plain else ALPHA if options.alpha is None else options.alpha
            made = make(
                load_model(settings), prompts, options.out, scheme=options.scheme, alpha=alpha,
                weights=not options.scales_only,
                tell=lambda part, done, total: progress.update(bars[part], completed=done, total=total),
            )  # fmt: skip
    except (StatisticsError, RecipeError, StoreError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--out: {options.out} cannot be written ({error.strerror})") from error
    for part, (report, size_bytes) in made.items():
        left = len(report.skipped)
        print(f"{part}: {len(report.changed)} layers in {options.scheme}, {left} left as they were, {size_bytes} bytes")
    return 0


def _quantize_text(options: argparse.Namespace, prompts: list[str]) -> int:
    """As for pictures' models: prompts are read as plain texts."""
    from core.quant.convert import RecipeError
    from core.quant.statistics import StatisticsError
    from core.quant.store import StoreError
    from llm.load import TextModelError, load
    from llm.quantized import make
    from llm.recipe import ALPHA, llama

    if options.scales_only:
        raise UsageError("--scales-only: is for models that draw; a --text-model is written with its weights")
    alpha = None if options.plain else ALPHA if options.alpha is None else options.alpha
    try:
        model = load(options.text_model)
        start = model.tokenizer.bos_token_id
        texts = [model.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in prompts]
        texts = [([] if start is None else [start]) + text for text in texts]
        texts = [text[: model.context] for text in texts]
        report = make(model, texts, options.out, recipe=llama(alpha), scheme=options.scheme)
    except TextModelError as error:
        raise UsageError(f"--text-model: {error}") from error
    except (StatisticsError, RecipeError, StoreError) as error:
        raise UsageError(str(error)) from error
    print(f"text: {len(report.changed)} layers in {options.scheme}, {len(report.skipped)} left as they were")
    return 0
