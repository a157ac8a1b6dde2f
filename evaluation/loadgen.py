"""Runs MLPerf's LoadGen, which decides when samples are requested and judges the timing.

LoadGen contains its own numbers for a model (for images: 5,000 samples, 600 s, 20 s at the 99th percentile); a run's
changes are in its user.conf.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.extras import pip_install
from evaluation.loadgen_tasks import LoadGenTask, LoggedAnswer
from evaluation.pixels import Pixels

ACCURACY, PERFORMANCE = "accuracy", "performance"
# LoadGen's kinds of configuration: its built-in one, whatever file is named, and a user's. The first call of a process
# reads the built-in one in any case, later ones do not: so it is requested each time.
_OWN, _USER = 0, 1
# Settings that make a run shorter than the official one when lowered.
_LENGTHS = ("min_duration_ms", "min_query_count", "performance_sample_count_override")
_CONFIDENCE = 0.99  # required by LoadGen's early stopping


class LoadGenError(RuntimeError):
    """LoadGen is not installed, refuses its configuration, or ended without a summary."""


class LoadGenSettings(NamedTuple):
    """LoadGen's settings for a test. None: as in its own configuration."""

    scenario: str
    mode: str = PERFORMANCE
    target_qps: float | None = None
    duration_s: float | None = None
    queries: int | None = None
    user_conf: Path | None = None


class Result(NamedTuple):
    """The result of a test. `summary` are LoadGen's summary lines by name, `told` is its verdict with its
    recommendations; `short` says in what respect the test is less than an official one.
    """

    valid: bool | None  # None in accuracy mode, which is not timed
    summary: Mapping[str, str]
    message: str
    short: list[str]


class SystemUnderTest:
    """The system under test: submits requested samples, and returns each answer's bytes when it is done."""

    def __init__(self, task: LoadGenTask, *, token_latencies: bool) -> None:
        self.failed = 0
        self.problem: BaseException | None = None
        self._task = task
        self._token_latencies = token_latencies
        self._lock = threading.Lock()
        self._loadgen = _library()

    def issue(self, samples: Sequence[Any]) -> None:
        for sample in samples:
            id = sample.id  # read now: LoadGen frees the sample when this call ends
            try:
                future = self._task.submit(sample.index, partial(self._begun, id))
            except Exception as error:  # LoadGen waits for an answer to each sample, so it must get one
                future = Future()
                future.set_exception(error)
            future.add_done_callback(partial(self._answer, id))

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def _begun(self, id: int) -> None:
        if self._token_latencies:
            token = np.zeros(1, np.int32)
            response = self._loadgen.QuerySampleResponse(id, token.ctypes.data, token.nbytes)
            self._loadgen.FirstTokenComplete([response])

    def _answer(self, id: int, done: Future[Any]) -> None:
        try:
            answer = self._task.answer(done.result())
        except BaseException as error:
            with self._lock:
                self.failed += 1
                self.problem = self.problem or error
            answer = LoggedAnswer(np.zeros(0, np.uint8), 1)
        data = np.ascontiguousarray(answer.data)
        # Copied before the call returns, if it is logged at all.
        address = data.ctypes.data if data.size else 0
        counted = () if answer.tokens is None or not self._token_latencies else (answer.tokens,)
        self._loadgen.QuerySamplesComplete([self._loadgen.QuerySampleResponse(id, address, data.nbytes, *counted)])


def run(test: LoadGenSettings, task: LoadGenTask, out: Path, warn: Callable[[str], None] = lambda text: None) -> Result:
    """Run one test; LoadGen's logs and the user.conf go into `out`. Raises `LoadGenError`.

    `warn` is called before the test if its length alone makes it INVALID.
    """
    library = _library()
    settings, short = _settings(test, task, out)
    if (problem := too_few(test, settings)) is not None:
        warn(problem)
    log = library.LogSettings()
    log.log_output.outdir = str(out)
    log.log_output.copy_summary_to_stdout = False
    log.enable_trace = False
    answering = SystemUnderTest(task, token_latencies=settings.use_token_latencies)
    sut = library.ConstructSUT(answering.issue, answering.flush)
    count = min(len(task), settings.performance_sample_count_override or len(task))
    qsl = library.ConstructQSL(len(task), count, lambda indices: None, lambda indices: None)

    def run_test() -> None:
        try:
            library.StartTestWithLogSettings(sut, qsl, settings, log)
        finally:
            library.DestroyQSL(qsl)
            library.DestroySUT(sut)

    # Ctrl-C interrupts the main thread alone: an exception in what LoadGen calls would abort the process.
    _in_thread(run_test)
    if answering.failed:
        raise LoadGenError(f"{answering.failed} samples failed; the first: {answering.problem}")
    if test.mode == ACCURACY:
        return Result(None, {}, "", short)
    summary, messages = read_summary(out / "mlperf_log_summary.txt")
    return Result(summary.get("Result is") == "VALID", summary, messages, short)


def _in_thread(function: Callable[[], None]) -> None:
    """Run a function on a thread of its own, and wait for it. Raises what it raises."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            function()
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="loadgen", daemon=True).start()
    result.result()


def too_few(test: LoadGenSettings, settings: Any) -> str | None:
    """Return why a timed test with these settings of LoadGen's issues too few queries to be VALID, or None.

    LoadGen's early stopping requires 99% confidence that the target percentile of latencies is met (MLPerf Inference
    Rules, "Early stopping"). Offline is one query, and has no such bound.
    """
    if test.mode != PERFORMANCE or test.scenario == "Offline":
        return None
    server = test.scenario == "Server"
    percentile = (
        settings.server_target_latency_percentile if server else settings.single_stream_target_latency_percentile
    )
    # SingleStream's estimate leaves out the slowest query; for Server the best case is that none is late.
    needed = fewest_queries(percentile, late=0 if server else 1)
    issued = int(settings.min_query_count)
    if server:
        issued = max(issued, math.ceil(settings.server_target_qps * settings.min_duration_ms / 1000))
    if settings.max_query_count:
        issued = min(issued, int(settings.max_query_count))
    if issued >= needed:
        return None
    hope = "even if none is late" if server else "or a --duration that brings as many"
    return (
        f"{test.scenario} issues {issued} queries, and LoadGen calls fewer than {needed} INVALID: --queries {needed} "
        f"is the least for the {100 * percentile:g}th percentile, {hope}"
    )


def fewest_queries(percentile: float, late: int) -> int:
    """The smallest n for which at most `late` late queries of n show that more than `percentile` are in time.

    That is, P(Binomial(n, 1 - percentile) <= late) <= 1 - `_CONFIDENCE`.
    """
    n, passed, wrong = late + 1, percentile, 1 - percentile
    while sum(math.comb(n, k) * wrong**k * passed ** (n - k) for k in range(late + 1)) > 1 - _CONFIDENCE:
        n += 1
    return n


def read_summary(path: Path) -> tuple[dict[str, str], str]:
    """The lines `name : value` of LoadGen's summary, and its first part as it stands. Raises `LoadGenError`."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise LoadGenError(f"LoadGen left no summary: {path} cannot be read ({error.strerror})") from None
    parts = re.split(r"^=+\n.*\n=+\n", text, flags=re.MULTILINE)  # each under a heading between two rules
    lines = {m[1].strip(): m[2].strip() for m in re.finditer(r"^([^:\n]+?)\s*:[ \t]*(.*)$", text, re.MULTILINE)}
    return lines, (parts[1] if len(parts) > 1 else text).strip()


def read_accuracy(path: Path, side: tuple[int, int]) -> Iterator[tuple[int, Pixels]]:
    """(caption's index, uint8 [H, W, 3]) of `mlperf_log_accuracy.json`, an entry at a time: the file may be large.

    `side` is (width, height). Raises `LoadGenError` naming the line.
    """
    width, height = side
    with path.open("r", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            text = line.strip().rstrip(",")
            if text in ("", "[", "]"):
                continue
            try:
                entry = json.loads(text)
                data = np.frombuffer(bytes.fromhex(entry["data"]), np.uint8).reshape(height, width, 3)
                index = int(entry["qsl_idx"])
            except (ValueError, KeyError, TypeError) as error:
                raise LoadGenError(f"{path}: line {number} is no picture of {width}x{height} ({error})") from None
            yield index, data


def _settings(test: LoadGenSettings, task: LoadGenTask, out: Path) -> tuple[Any, list[str]]:
    """LoadGen's settings from its own configuration and a user.conf, and in what respect they are less than official
    ones.
    """
    library = _library()
    official, test_settings = library.TestSettings(), library.TestSettings()
    conf = out / "user.conf"
    conf.write_text(_user_conf(test, task), "utf-8")
    for settings, kinds in ((official, (_OWN,)), (test_settings, (_OWN, _USER))):
        for kind in kinds:
            if settings.FromConfig(str(conf), task.model, test.scenario, kind):
                raise LoadGenError(f"LoadGen does not take {conf}")
        settings.scenario = getattr(library.TestScenario, test.scenario)
        settings.mode = library.TestMode.AccuracyOnly if test.mode == ACCURACY else library.TestMode.PerformanceOnly
    short = [
        f"{name} is {getattr(test_settings, name)}, official: {getattr(official, name)}"
        for name in _LENGTHS
        if getattr(test_settings, name) < getattr(official, name)
    ]
    return test_settings, short


def _user_conf(test: LoadGenSettings, task: LoadGenTask) -> str:
    """LoadGen's configuration for this run: the user's own file, overridden by the command line."""
    lines = []
    if test.user_conf is not None:
        try:
            lines.append(test.user_conf.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise LoadGenError(
                f"{test.user_conf}: cannot be read ({getattr(error, 'strerror', None) or error})"
            ) from None
    for key, value in (
        ("target_qps", test.target_qps),
        ("min_duration", None if test.duration_s is None else round(1000 * test.duration_s)),
        ("min_query_count", test.queries),
        ("performance_sample_count_override", len(task) if len(task) < task.samples else None),
    ):
        if value is not None:
            lines.append(f"*.{test.scenario}.{key} = {value}\n")
    return "".join(lines) or "# Nothing is changed.\n"


def _library() -> Any:
    try:
        import mlperf_loadgen
    except ImportError:
        raise LoadGenError(f"LoadGen is not installed: {pip_install('eval')}, or mlcommons-loadgen") from None
    return mlperf_loadgen
