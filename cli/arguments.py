"""Shared by all commands: options of the model, settings from options, and building the engine under a spinner."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_origin

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from contract.errors import Invalid
    from core.batching.engine import Engine
    from core.config import Settings
    from llm.runner import TextRunner
    from workers.build import Runtime

FOLDERS = ("lora_dir", "embeddings_dir", "control_dir", "depth_model", "ip_adapter_dir", "upscalers_dir")
"""The settings of what a request may name besides a model."""
Commands = Any  # argparse keeps the class of its subparsers to itself


class UsageError(ValueError):
    """Invalid user input. The message names it."""


class CommandFailed(RuntimeError):
    """A command failed although its input was valid. The message says why."""


# A parser, or a group of its options.
Options = argparse._ActionsContainer


def add_command(commands: Commands, name: str, text: str, description: str, summary: str) -> argparse.ArgumentParser:
    """Add a command: `text` is its line in the list of all, `summary` stands below its options as it is written."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=description, epilog=summary, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser


def add_out(parser: Options) -> None:
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("out"), metavar="DIR", help="for the pictures; default: %(default)s"
    )


def add_settings(parser: Options, *names: str) -> None:
    """Add an option for each of these settings, which overrides it: see `read_settings`."""
    from core.config import Settings

    for name in names:
        info = Settings.model_fields[name]
        flag, text = "--" + name.replace("_", "-"), (info.description or "").replace("empty: ", "default: ")
        kind: Any = info.annotation
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif get_origin(kind) is Literal:
            parser.add_argument(flag, choices=get_args(kind), help=text)
        else:
            metavar = "N" if kind in (int, float) else "DIR" if name.endswith("_dir") else "NAME"
            parser.add_argument(flag, type=int if kind is int else str, metavar=metavar, help=text)


def add_model(parser: Options, *, deepcache: bool = True, speed: Options | None = None) -> None:
    """Add the options of a model; those that decide how fast it runs go to `speed`, if it is given."""
    speed = speed or parser
    add_settings(parser, "model", "variant", "tiny_vae", "unet")
    add_settings(speed, "precision", "backend", "offload", "threads", "compile")
    if deepcache:
        add_settings(speed, "deepcache")


def add_plan(parser: Options) -> None:
    add_settings(parser, "plan", "plans")


def add_steps(parser: Options) -> None:
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="of denoising; default: %(default)s")


def check_steps(options: argparse.Namespace) -> None:
    from contract.card import MAX_STEPS

    check_range(options, "steps", 1, MAX_STEPS)


def check_range(options: argparse.Namespace, name: str, low: float, high: float = math.inf) -> None:
    """Raise `UsageError` for an option that is given, and not within these bounds."""
    from contract.bounds import range_error, short

    value = getattr(options, name)
    if value is not None and not low <= value <= high:
        wrong = f"must be at least {low}, not {short(value)}" if high == math.inf else range_error(low, high, value)
        raise UsageError(f"--{name.replace('_', '-')}: {wrong}")


def read_settings(options: argparse.Namespace, **defaults: Any) -> Settings:
    """Build the settings: options override the environment, which overrides the command's `defaults`.

    Every option with a setting's name is one. The default plan of requests is left out for commands without that
    option, which make none. Raises `core.config.SettingsError`.
    """
    from core.config import Settings, read

    settings = read(**{name: value for name, value in vars(options).items() if name in Settings.model_fields})
    if not hasattr(options, "plan"):
        settings = settings.model_copy(update={"plan": ""})
    if settings.models and not hasattr(options, "models"):
        settings = settings.catalogue[0]
    if settings.text_models and not hasattr(options, "text_models"):
        settings = next(iter(settings.text_catalogue), settings)
    return settings.model_copy(update={k: v for k, v in defaults.items() if k not in settings.model_fields_set})


def wrong_option(error: Invalid, flags: Mapping[str, str] = {}) -> UsageError:
    """The error for a field, named after the option that gives it: in `flags`, or else the field's own name."""
    field = error.field or "request"
    return UsageError(f"{flags.get(field, '--' + field.replace('_', '-'))}: {error.message}")


def create_cache_folder(settings: Settings) -> None:
    """Create the folder of compiled code, if code is to be compiled. Raises `UsageError`."""
    if settings.compile:
        try:
            settings.compiled_code.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"DIPTYCH_CACHE_DIR: {error.filename} cannot be made ({error.strerror})") from error


@contextlib.contextmanager
def model_errors() -> Iterator[None]:
    """Context that turns errors of the packages below into the command line's."""
    from contract.errors import Invalid
    from core.batching.engine import Closed
    from pipeline.checkpoints.folder import ModelError
    from workers.draw import OutputWriteError

    try:
        yield
    except (Invalid, OutputWriteError) as error:
        raise UsageError(str(error)) from error
    except ModelError as error:
        raise UsageError(f"model: {error}") from error
    except Closed as error:
        raise CommandFailed(f"{error} ({error.__cause__ or 'no reason is known'})") from error


def read_size(text: str | None) -> tuple[int, int] | None:
    """Width and height from `--size`. Raises `UsageError`."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,5})[xX×](\d{1,5})", text)
    if match is None:
        digits = "" if re.fullmatch(r"\d+[xX×]\d+", text) is None else ", with at most five digits a side"
        raise UsageError(f"--size: must look like 1024x1024{digits}, not {text!r}")
    return int(match[1]), int(match[2])


class StartupProgress:
    """A spinner with the current activity, or a progress bar while something is counted."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting")
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bar()
        self._status.stop()

    def say(self, text: str) -> None:
        self._end_bar()
        self._status.update(text)

    def count(self, text: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._status.stop()
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._bar.add_task(text, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)
        if done == total:
            self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._status.start()


def open_runtime(settings: Settings, console: Console, measure_s: float = 0.0) -> Runtime:
    """Build the engine under a spinner."""
    # Imports create millions of long-lived objects; scanning them for garbage takes a tenth of the start-up time.
    gc.disable()
    try:
        with StartupProgress(console) as starting:
            from pipeline.checkpoints.load import check_name

            check_name(settings.model_name)  # importing torch and its dependencies takes seconds
            from workers.build import build

            return build(settings, measure_s=measure_s, say=starting.say, count=starting.count)
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def open_texts(settings: Settings, console: Console, measure_s: float = 0.0) -> Iterator[tuple[Engine, TextRunner]]:
    """Context: the settings' text model on an engine of its own, built under a spinner. Raises `UsageError`."""
    from core.batching.engine import Engine
    from core.batching.runner import Lane
    from pipeline.checkpoints.folder import ModelError
    from workers.build_text import text_lane, text_runner

    with contextlib.ExitStack() as stack:
        with console.status("starting") as status:
            try:
                lane = text_lane(settings) or Lane("text")
                stack.callback(lane.close)
                runner = text_runner(settings, lane, status.update)
            except ModelError as error:
                raise UsageError(f"--text-model: {error}") from error
            if runner is None:
                raise UsageError("--text-model: not set, or the embedded one is not installed or does not load")
            stack.callback(runner.close)
            if measure_s:
                runner.prepare(measure_s=measure_s)
        yield stack.enter_context(Engine([runner])), runner
