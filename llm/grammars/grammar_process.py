"""A process that compiles JSON schemas for a worker within limits of time, memory and stack: run as a script.

llguidance has no limit for all that a schema may cost it: some of a hundred characters take minutes or gigabytes,
others overflow its stack, which ends the process. Here this ends nothing but a fork of this process. It reads frames
of JSON on its standard input (first a tokenizer, then a grammar's kind and text each) and answers each with a frame.
`compile_grammar` is also what the worker calls, with schemas that were compiled here. Imports only llguidance, and
nothing of this project.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

CPU_S = 1.0  # to compile a schema, and to compute which tokens an answer may begin with
MEMORY_BYTES = 160 * 2**20  # and beyond what the tokenizer takes
STACK_BYTES = 2 * 2**20  # a quarter of what the worker compiles with
NICE = 10  # of whatever compiles: beside a forward on all processors it gets a tenth of one, and delays it by that
SCHEMA, LARK = "schema", "lark"  # kinds of grammars
MAX_MESSAGE = 200  # characters
SPACE = r"[ \n]{0,2}"  # between two tokens; without a bound a model may produce it for ever
_PLACE = re.compile(r"^at \d+\(\d+\): ")  # in a grammar that is ours
_FRAME = struct.Struct(">I")
_VERDICTS = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGSEGV, -signal.SIGTRAP}
# Half of llguidance's defaults for a step, which then takes 25 ms at most; a row has room for 500 optional properties.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_500,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}


def make_tokenizer(tokenizer: str, vocabulary: int, ends: list[int]) -> Any:
    """llguidance's tokenizer, of a tokenizers JSON. Raises ImportError without llguidance."""
    import llguidance

    return llguidance.LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=ends or None)


def compile_grammar(tokenizer: Any, kind: str, text: str) -> tuple[Any, bytes]:
    """A matcher at an answer's beginning, and its first mask. Raises ValueError with one line.

    `text` is a JSON schema, or, of the kind `LARK`, a grammar in llguidance's Lark.
    """
    import llguidance

    if kind == LARK:
        grammar = llguidance.LLMatcher.grammar_from_lark(text)
    else:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACE})
    limits = llguidance.LLParserLimits(**_LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(_PLACE.sub("", first_line(matcher.get_error())))
    return matcher, mask


def first_line(text: str) -> str:
    """The first line of an error, cut, and with everything escaped that is no printable character."""
    line = next(iter(text.strip().splitlines()), "")[:MAX_MESSAGE]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)[:MAX_MESSAGE]


def read_frame(stream: IO[bytes]) -> Any:
    """The next frame's JSON. Raises EOFError."""
    head = stream.read(_FRAME.size)
    body = stream.read(_FRAME.unpack(head)[0]) if len(head) == _FRAME.size else b""
    if len(head) < _FRAME.size or len(body) < _FRAME.unpack(head)[0]:
        raise EOFError
    return json.loads(body)


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Write a frame of JSON."""
    body = json.dumps(value).encode()
    stream.write(_FRAME.pack(len(body)) + body)
    stream.flush()


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    request = read_frame(requests)
    tokenizer = make_tokenizer(request["tokenizer"], request["vocabulary"], request["ends"])
    del request
    _limit_memory()
    write_frame(answers, {})
    while True:
        write_frame(answers, {"error": _error(tokenizer, *read_frame(requests))})


def _error(tokenizer: Any, kind: str, text: str) -> str | None:
    """Return why a grammar is refused, or None. Compile it in a fork of this process, which has no other thread."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            _on_small_stack(lambda: _compile(tokenizer, kind, text, writing))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as result:
        error = result.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code == -signal.SIGPROF:
        return f"takes more than {CPU_S:g} s to compile"
    if code in _VERDICTS:
        return "takes too much memory or nesting to compile"
    if code < 0:  # killed from outside: nothing is known of the schema
        os._exit(1)
    return error or None


def _compile(tokenizer: Any, kind: str, text: str, writing: int) -> None:
    """Write to the descriptor why the grammar is refused; nothing if it is not."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # the signal ends this process
    try:
        compile_grammar(tokenizer, kind, text)
    except ValueError as error:
        os.write(writing, (first_line(str(error)) or "cannot be enforced").encode())
    except BaseException as error:  # a panic of llguidance
        os.write(writing, f"cannot be compiled ({type(error).__name__})".encode())


def _limit_memory() -> None:
    pages = Path("/proc/self/statm")
    if pages.exists():
        limit_bytes = int(pages.read_text().split()[0]) * resource.getpagesize() + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _on_small_stack(function: Callable[[], None]) -> None:
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker's terminal sends it to both; the worker ends this
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the worker has ended
        _serve(requests, answers)


if __name__ == "__main__":
    main()
