"""`diptych captions`: the text model writes a prompts file for `diptych evaluate`."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import (
    CommandFailed,
    Commands,
    UsageError,
    add_command,
    add_settings,
    check_range,
    model_errors,
    open_texts,
    read_settings,
    wrong_option,
)
from contract.precision import PRECISIONS

if TYPE_CHECKING:
    from rich.console import Console

    from core.config import Settings
    from lab.captions.caption_client import CaptionClient
    from lab.captions.caption_file import CaptionFile
    from lab.captions.text_sources import TextSource

_ABOUT = """examples:
  diptych captions --count 1000 --out captions.tsv
  diptych evaluate --prompts captions.tsv --out runs/int8 --precision int8

  diptych captions --count 500 --out zoo.tsv --subjects animals.txt --temperature 1.1
  diptych captions --count 5000 --out captions.tsv --text-model path/to/llama --template ask.txt --model path/to/sdxl

FILE.json beside the file tells what the captions were asked for with. Where a command was stopped, in whatever way, the
same command goes on, and ends with the same file. An answer that is no caption, or one that is there already, is made
again with the row's next seed; a row that never becomes one is left out, told, and listed in FILE.json.

A template is what the model is asked instead of our own words, the subject in place of {subject}: a chat's message, or,
for a model without a chat template, a text that it continues to the line's end.

exit codes: 0 all captions are there; 1 some could not be made; 2 the input cannot be used, and is named;
130 stopped (143: by SIGTERM)
"""
_MOST = 1_000_000
_MOST_ATTEMPTS = 1000
_SHOWN = 10  # failed rows shown


def add(commands: Commands) -> None:
    captions = add_command(
        commands,
        "captions",
        "write a prompts file with the text model",
        "The text model writes captions for `evaluate`: distinct ones, that the picture model can read.",
        _ABOUT,
    )
    captions.add_argument("--count", type=int, required=True, metavar="N", help="how many captions")
    captions.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="a .tsv that is not there yet")
    captions.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds, equal files; default: 0")
    captions.add_argument(
        "--subjects",
        type=Path,
        metavar="FILE",
        help="what captions are about in turn: one a line, or a .tsv, .csv, .json, .jsonl with caption, prompt or name",
    )
    captions.add_argument("--template", type=Path, metavar="FILE", help="what the model is asked; see below")
    captions.add_argument("--temperature", type=float, metavar="T", help="0.7 of emoji-lm, 1 of others by default")
    captions.add_argument("--top-p", type=float, metavar="P", help="1 of emoji-lm, 0.95 of others by default")
    captions.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an answer; default: %(default)s")
    captions.add_argument(
        "--attempts", type=int, default=64, metavar="N", help="at a row, until it is left out; default: %(default)s"
    )
    add_settings(captions, "text_model", "threads")
    captions.add_argument("--text-precision", choices=tuple(PRECISIONS), help="of computation")
    captions.add_argument("--model", metavar="NAME", help="that is to read them; default: the embedded one")
    captions.add_argument("--server", metavar="URL", help="of a running service that writes, instead of this process")
    captions.add_argument("--key", metavar="KEY", help="for a service that asks for one")
    captions.set_defaults(run=_captions)


def _captions(options: argparse.Namespace) -> int:
    from rich.console import Console

    from contract.errors import Invalid
    from evaluation.service import SourceError
    from lab.captions.caption_file import CaptionFile, CaptionFileError
    from lab.captions.caption_filter import REASONS
    from lab.captions.compose import HopelessError

    console = Console(stderr=True)
    _check(options)
    subjects, template = _subjects(options), _template(options)
    settings = read_settings(options)
    if not options.server and settings.text_model_name is None:
        raise UsageError("--text-model: not set, and models/emoji-lm is not installed, or DIPTYCH_TEXT_MODEL is off")
    try:
        with CaptionFile(options.out, _asked(options, settings, subjects, template), options.count) as file:
            if not file.finished:
                _write(file, options, settings, subjects, template, console)
            return _tell(file, console)
    except CaptionFileError as error:
        raise UsageError(f"--out: {error}") from error
    except SourceError as error:
        raise CommandFailed(f"--server: {error}") from error
    except HopelessError as error:
        reasons = ", ".join(f"{count} {REASONS[reason]}" for reason, count in error.again.most_common())
        raise CommandFailed(f"no valid caption was generated: of {error.again.total()} answers {reasons}") from error
    except Invalid as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--out: {error.filename or options.out} cannot be written ({error.strerror})") from error


def _check(options: argparse.Namespace) -> None:
    from contract.bounds import MAX_SEED
    from contract.text import MAX_TEMPERATURE

    for name, low, high in (
        ("count", 1, _MOST), ("attempts", 1, _MOST_ATTEMPTS), ("max_tokens", 1, MAX_SEED), ("seed", 0, MAX_SEED),
        ("temperature", 0, MAX_TEMPERATURE), ("top_p", 0, 1),
    ):  # fmt: skip
        check_range(options, name, low, high)
    if options.top_p == 0:
        raise UsageError("--top-p: must be more than 0")
    if options.out.suffix.lower() != ".tsv":
        raise UsageError(f"--out: must end in .tsv, for `evaluate` to find the captions in it, not {options.out}")
    if options.key and not options.server:
        raise UsageError("--key: is for --server")


def _subjects(options: argparse.Namespace) -> dict[int, str]:
    """The captions' subjects, in turn, by row of the file; none if not given. Raises `UsageError`."""
    from evaluation import captions
    from lab.captions.caption_filter import squeeze
    from pipeline.text import prompts

    path: Path | None = options.subjects
    if path is None:
        return {}
    try:
        captions.read(path)
        rows = prompts.read(path, columns=captions.COLUMNS, names=captions.IDS)
    except captions.PromptsError as error:
        raise UsageError(f"--subjects: {error}") from error
    if path.suffix.lower() not in prompts.DELIMITERS:  # whose cells may hold line ends
        for before, after in pairwise(rows):
            if after.row > before.row + 1:
                raise UsageError(f"--subjects: {path}: row {before.row + 1} is empty")
    for row in rows:
        if not squeeze(row.text):
            raise UsageError(f"--subjects: {path}: row {row.row} holds no words")
    return {row.row: squeeze(row.text) for row in rows}


def _template(options: argparse.Namespace) -> str | None:
    from contract.card import MAX_PROMPT_CHARACTERS
    from contract.characters import text_error
    from lab.captions.caption_client import SUBJECT

    path: Path | None = options.template
    if path is None:
        return None
    try:
        text = path.read_text("utf-8-sig").strip()
    except OSError as error:
        raise UsageError(f"--template: {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--template: {path}: is not UTF-8 (byte {error.start})") from error
    wrong = text_error(text, MAX_PROMPT_CHARACTERS) or (None if text else "is empty")
    if wrong is not None:
        raise UsageError(f"--template: {path}: {wrong}")
    if SUBJECT not in text:
        raise UsageError(f"--template: {path}: has no {SUBJECT}, where what a caption is about belongs")
    return text


def _asked(
    options: argparse.Namespace, settings: Settings, subjects: dict[int, str], template: str | None
) -> dict[str, Any]:
    """The request settings that must stay the same when the file is continued."""
    where: dict[str, Any]
    if options.server:
        where = {"server": options.server.rstrip("/"), "text_model": options.text_model}
    else:
        where = {
            "server": None, "text_model": _short(settings.text_model_name or ""),
            "text_precision": settings.text_precision, "text_draft": settings.text_draft, "text_kv": settings.text_kv,
        }  # fmt: skip
    return where | {
        "seed": options.seed,
        "subjects": _digest(options.subjects, "\n".join(subjects.values())) if subjects else None,
        "template": None if template is None else _digest(options.template, template),
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_tokens": options.max_tokens,
        "attempts": options.attempts,
        "for_model": _short(settings.model_name),
    }


def _short(name: str) -> str:
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else name


def _digest(path: Path, text: str) -> str:
    return f"{path.name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _write(
    file: CaptionFile,
    options: argparse.Namespace,
    settings: Settings,
    subjects: dict[int, str],
    template: str | None,
    console: Console,
) -> None:
    """Generate the missing rows, and finish the file."""
    from evaluation import generate
    from lab.captions import caption_filter
    from lab.captions.caption_client import CaptionClient
    from lab.captions.compose import CaptionGenerator

    with contextlib.ExitStack() as stack:
        stack.enter_context(model_errors())
        try:
            sieve = caption_filter.CaptionFilter(caption_filter.tokenizers(settings.model_name))
            author = _author(options, settings, stack, console)
            asker = CaptionClient(
                author.expansion_instruction, chat=author.chat, seed=options.seed, subjects=tuple(subjects.values()),
                template=template, temperature=options.temperature, top_p=options.top_p, max_tokens=options.max_tokens,
            )  # fmt: skip
            if not options.server:
                _try(author, asker, options, tuple(subjects))
            if file.rows:
                console.print(f"{len(file.rows)} of {file.count} captions are there", highlight=False)
            sampling = {"temperature": asker.temperature, "top_p": asker.top_p}
            file.begin(author.about | sampling)
            CaptionGenerator(file, asker, author, sieve, options.attempts).run(
                stack.enter_context(generate.bars(console))
            )
        except KeyboardInterrupt:
            done = f"{len(file.rows)} of {file.count} captions are there; the same command goes on"
            raise KeyboardInterrupt(done) from None
    file.finish()


def _author(
    options: argparse.Namespace, settings: Settings, stack: contextlib.ExitStack, console: Console
) -> TextSource:
    """The engine or the service that writes, open as long as the stack is."""
    if options.server:
        from lab.captions.text_sources import RemoteTextService

        return stack.enter_context(
            contextlib.closing(RemoteTextService(options.server, options.key, options.text_model))
        )
    from lab.captions.text_sources import LocalTextEngine

    engine, runner = stack.enter_context(open_texts(settings, console, measure_s=0.5))
    return LocalTextEngine(engine, runner, 2 * settings.text_requests)


def _try(author: TextSource, asker: CaptionClient, options: argparse.Namespace, rows: Sequence[int]) -> None:
    """Reject what the model does not accept before anything is written: of all rows of --subjects, or of the first."""
    from contract.errors import Invalid
    from lab.captions.text_sources import LocalTextEngine

    assert isinstance(author, LocalTextEngine)
    for index in range(max(1, len(rows))):
        try:
            author.check(asker.first(index, 0))
        except Invalid as error:
            question = f"--subjects: {options.subjects}: row {rows[index]}" if rows else "--template"
            flags = {error.field or "": question, "max_tokens": "--max-tokens"}
            raise wrong_option(error, flags) from error


def _tell(file: CaptionFile, console: Console) -> int:
    """Print the outcome; returns 1 if captions are missing."""
    from lab.captions.caption_filter import REASONS

    done = [row for row in file.rows if row.caption is not None]
    missing = [row for row in file.rows if row.caption is None]
    again = ", ".join(f"{count} {REASONS[reason]}" for reason, count in file.again.most_common())
    words = sum(len((row.caption or "").split()) for row in done) / max(1, len(done))
    tokens = sum(row.tokens for row in done) / max(1, len(done))
    lines = [
        f"{len(done)} captions of {len(done) + file.again.total()} answers{': ' + again if again else ''}; {words:.1f} "
        f"words and {tokens:.1f} of the picture model's tokens on average"
    ]
    if missing:
        for row in missing[:_SHOWN]:
            lines.append(f"{row.index:05d}{f' about {row.subject!r}' if row.subject else ''}: {row.again}")
        left = f"{len(missing)} of {file.count} captions could not be made"
        lines += [f"{left} in {file.settings['attempts']} attempts each; {file.manifest} lists them"]
    style = "yellow" if missing else ""
    for line in lines:
        console.print(line, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)
    print(file.out, flush=True)
    return int(bool(missing))
