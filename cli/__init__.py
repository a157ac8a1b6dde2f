"""The command line: `diptych generate | chat | captions | evaluate | mlperf | quantize | bench | serve | api | worker |
keys` and `models`.

Exit code 2 means input that cannot be used. Each family of commands has a file, which imports other packages only when
needed: imports are most of a short command's time.
"""

from __future__ import annotations

import argparse
import gc
import io
import logging
import os
import sys
from collections.abc import Sequence

from cli import bench, captions, chat, convert, doctor, evaluate, generate, keys, mlperf, models, quantize, serve, tune
from cli.arguments import CommandFailed, UsageError
from contract.printable import printable_lines
from core.threads import uninterruptible


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    for library in ("torch", "filelock", "urllib3", "httpx"):
        logging.getLogger(library).setLevel(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no text at all
    try:
        return _run(options)
    except KeyboardInterrupt as error:
        print(f"stopped: {printable_lines(str(error))}" if str(error) else "stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it: print nothing, and fail no flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(options: argparse.Namespace) -> int:
    from core.config import SettingsError

    try:
        return int(options.run(options) or 0)
    except (UsageError, SettingsError) as error:
        print(f"diptych: {printable_lines(str(error))}", file=sys.stderr)
        return 2
    except CommandFailed as error:
        print(f"diptych: {printable_lines(str(error))}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    whole = argparse.ArgumentParser(prog="diptych", description="Text-to-image serving: SDXL, batched step by step.")
    whole.add_argument("--version", action=_Version)
    whole.add_argument("-v", "--verbose", action="store_true", help="say what happens inside")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    drawing = (generate, chat, serve, keys, models, doctor)
    for family in (*drawing, convert, quantize, captions, evaluate, tune, mlperf, bench):
        family.add(commands)
    return whole


class _Version(argparse.Action):
    """Print the installed version and exit; reads it only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"diptych {version('diptych')}")
        parser.exit()


def entry() -> None:
    """The console script: run `main`, and end at once where a thread runs that cannot be interrupted."""
    # Imports make millions of objects that stay: at Python's own threshold, scanning them is a fifth of the start.
    gc.set_threshold(50_000, 10, 10)
    code = main()
    if uninterruptible():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
