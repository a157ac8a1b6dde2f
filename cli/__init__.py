"""The command line: `diptych generate | chat | evaluate | mlperf | quantize | serve | api | worker | keys | models`.

Exit code 2 means input that cannot be used. Each family of commands has a file, which is imported for these commands
alone, and imports other packages only when needed: imports are most of a short command's time. Further commands are
those of other packages (plugins.py).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from cli import plugins
from cli.arguments import CommandFailed, UsageError
from cli.interruption import Interruption
from contract.printable import printable_lines
from core.threads import exit_process

_FAMILIES = (
    "generate", "chat", "serve", "keys", "models", "doctor", "convert", "quantize", "evaluate", "tune", "mlperf",
)  # fmt: skip
_FAMILY_OF = {"api": "serve", "worker": "serve"}  # of commands that have another name
_SERVICES = ("serve", "api", "worker")  # for which SIGTERM is the usual end


def main(arguments: Sequence[str] | None = None, interruption: Interruption | None = None) -> int:
    """Run a command and return the exit code. `interruption`: what interrupts it, if that is more than Ctrl-C."""
    options = parser(_families(sys.argv[1:] if arguments is None else arguments)).parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(levelname)s %(message)s")
    for library in ("torch", "filelock", "urllib3", "httpx"):
        logging.getLogger(library).setLevel(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no text at all
    try:
        try:
            return _run(options)
        except (Exception, SystemExit) as error:
            if interruption is not None and interruption.signal is not None:
                raise KeyboardInterrupt from error  # libraries may report it as an error of theirs
            raise
    except KeyboardInterrupt as error:
        code = 130 if interruption is None else interruption.exit_code
        if code:
            print(f"stopped: {printable_lines(str(error))}" if str(error) else "stopped", file=sys.stderr)
        return code
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
    """The family of the command that these words name, or its name if another package adds it; else all of them."""
    if "--version" in words[:1]:
        return ()
    command = next((word for word in words if not word.startswith("-")), "")
    family = _FAMILY_OF.get(command, command)
    if family in _FAMILIES:
        return (family,)
    added = plugins.names()  # reads what is installed, which takes a while
    return (command,) if command in added else (*_FAMILIES, *added)


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


def parser(families: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The commands of these families, and their options; of all, and of other packages, by default."""
    root = _Parser(prog="diptych", description="Text-to-image serving, batched step by step.")
    root.add_argument("--version", action=_Version)
    root.add_argument("-v", "--verbose", action="store_true", help="say what happens inside")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for family in (*_FAMILIES, *plugins.names()) if families is None else families:
        if family in _FAMILIES:
            importlib.import_module(f".{family}", __name__).add(commands)
        else:
            plugins.add(commands, family)
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
    """The console script: run `main`, and end the process whatever its threads do."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    interruption = Interruption(stopped_by_sigterm=0 if command in _SERVICES else 143)
    interruption.install()  # for process 1, as of a container, the kernel drops a SIGTERM that has no handler
    # Imports make millions of objects that stay: at Python's own threshold, scanning them is a fifth of the start.
    gc.set_threshold(50_000, 10, 10)
    try:
        code = main(interruption=interruption)
        interruption.handled()
    except SystemExit as end:  # of argparse
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:  # outside of the command itself
        code = interruption.exit_code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    interruption.handled()
    exit_process(code)
