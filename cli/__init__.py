"""The command line: `diptych generate | chat | captions | evaluate | mlperf | quantize | bench | serve | api | worker |
keys` and `models`.

Exit code 2 means input that cannot be used. Each family of commands has a file, which is imported for these commands
alone, and imports other packages only when needed: imports are most of a short command's time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from cli.arguments import CommandFailed, UsageError
from contract.printable import printable_lines
from core.threads import uninterruptible

_FAMILIES = (
    "generate", "chat", "serve", "keys", "models", "doctor", "convert", "quantize", "captions", "evaluate", "tune",
    "tune_kernels", "mlperf", "bench",
)  # fmt: skip
_FAMILY_OF = {"api": "serve", "worker": "serve", "tune-kernels": "tune_kernels"}  # of commands that have another name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    options = parser(_families(sys.argv[1:] if arguments is None else arguments)).parse_args(arguments)
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


def _families(words: Sequence[str]) -> Sequence[str]:
    """The families of the command that these words name; all of them where they name none."""
    if "--version" in words[:1]:
        return ()
    command = next((word for word in words if not word.startswith("-")), "")
    family = _FAMILY_OF.get(command, command)
    return (family,) if family in _FAMILIES else _FAMILIES


class _Parser(argparse.ArgumentParser):
    """Refuses unknown options with the usage of the command that they were given to, and with its nearest one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            near = [name for option in options for name in get_close_matches(option, self._option_string_actions, 1)]
            hint = f"; did you mean {' and '.join(near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return namespace, unknown


def parser(families: Sequence[str] = _FAMILIES) -> argparse.ArgumentParser:
    """The commands of these families, and their options."""
    root = _Parser(prog="diptych", description="Text-to-image serving, batched step by step.")
    root.add_argument("--version", action=_Version)
    root.add_argument("-v", "--verbose", action="store_true", help="say what happens inside")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for family in families:
        importlib.import_module(f".{family}", __name__).add(commands)
    return root


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
    if os.getpid() == 1:
        # For process 1, as of a container, the kernel drops a SIGTERM that has no handler. Services replace this one.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    # Imports make millions of objects that stay: at Python's own threshold, scanning them is a fifth of the start.
    gc.set_threshold(50_000, 10, 10)
    code = main()
    if uninterruptible():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
