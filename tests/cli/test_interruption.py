"""Commands that are stopped by a signal, wherever they are: the promised exit code, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from PIL import Image

from deployment.redis import free_port
from pipeline.checkpoints import tiny
from tests.deployment.served import ROOT, environment, wait_until
from tests.servers import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]

PATIENCE_S = 120.0
_IDLE_LOOKS = 100  # of `wait_until`: five seconds
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
SERVICES = ("serve", "api", "worker")  # which SIGTERM ends with 0
_CATCHES = """
from cli.interruption import Interruption
import cli, os, signal, sys, threading, time
interruption = Interruption(stopped_by_sigterm=143)
interruption.install()
"""
_RUN = """
def command(options):
    {}
class Parser:
    def parse_args(self, _):
        import argparse
        return argparse.Namespace(run=command, verbose=False)
sys.argv = ["diptych"]
cli.parser = lambda *_: Parser()
cli.Interruption = lambda **_: interruption
interruption.install = lambda: None
cli.entry()
"""


def script(*lines: str, before: str = "") -> list[str]:
    """A process that runs these lines as a command of ours."""
    return [sys.executable, "-c", before + _CATCHES + _RUN.format("\n    ".join(lines))]


def interrupted(words: Sequence[str], folder: Path, *numbers: signal.Signals) -> tuple[int, str]:
    """Exit code and stderr of a process that gets these signals once it has printed `now` and after each `again`."""
    process = subprocess.Popen(
        words, cwd=folder, env=environment(PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with killed_at_last(process):
        assert process.stdout is not None
        for number in numbers:
            assert process.stdout.readline() == "now\n", process.communicate(timeout=PATIENCE_S)
            process.send_signal(number)
        err = process.communicate(timeout=PATIENCE_S)[1]
    return process.returncode, err


@contextlib.contextmanager
def killed_at_last(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for child in descendants(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


NOW = "print('now', flush=True)"
WAIT = "time.sleep(600)"


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize(
    "lines",
    [
        [NOW, WAIT],
        ["try:", f"    {NOW}; {WAIT}", "except BaseException: pass", WAIT],
        ["class Dropped:", f"    def __del__(self): {NOW}; {WAIT}", "Dropped()", WAIT],
        ["try:", f"    {NOW}; {WAIT}", "except BaseException: raise RuntimeError('the interrupt broke it')"],
        ["try:", f"    {NOW}; {WAIT}", "except BaseException: sys.exit(7)"],
        ["time.sleep(0.01)", "threading.Thread(target=time.sleep, args=(600,)).start()", NOW, WAIT],
    ],
    ids=["waiting", "swallowed", "in a destructor", "taken for an error", "taken for an exit", "beside a thread"],
)
def test_an_interrupt_is_never_lost(tmp_path: Path, lines: list[str], number: signal.Signals) -> None:
    code, err = interrupted(script(*lines), tmp_path, number)
    assert (code, err) == (CODES[number], "stopped\n")


def test_a_thread_that_computes_in_cpp_does_not_abort_the_process(tmp_path: Path) -> None:
    """Finalization unwinds it when it asks for the interpreter's lock, through C++ that allows no exception."""
    lines = [
        "import torch", "large = torch.ones(64, 64)", "model = torch.jit.script(torch.nn.Linear(64, 64))",
        "def compute():", "    while True: model(large)",
        "for _ in range(4): threading.Thread(target=compute, daemon=True).start()", NOW, WAIT,
    ]  # fmt: skip
    assert interrupted(script(*lines), tmp_path, signal.SIGINT) == (130, "stopped\n")


def test_what_is_imported_is_imported_to_its_end(tmp_path: Path) -> None:
    """An exception in a call by torch's initialization, which is C++, aborts the process."""
    ends = tmp_path / "ends"
    code = f"import time, pathlib\n{NOW}\ntime.sleep(1)\npathlib.Path({str(ends)!r}).touch()\n"
    (tmp_path / "slowly.py").write_text(code)
    words = script(f"sys.path.insert(0, {str(tmp_path)!r})", "import slowly", WAIT)
    assert interrupted(words, tmp_path, signal.SIGINT) == (130, "stopped\n")
    assert ends.exists()


@pytest.mark.parametrize(
    "stuck",
    [
        "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",  # C that does not return
        "try: time.sleep(600)\n    finally: time.sleep(600)",  # an end that does not end
    ],
)
def test_a_command_that_does_not_stop_is_ended(tmp_path: Path, stuck: str) -> None:
    shorter = "import cli.interruption; cli.interruption._PATIENCE_S = 0.5\n"
    assert interrupted(script(NOW, stuck, before=shorter), tmp_path, signal.SIGINT) == (130, "stopped\n")


def test_the_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Less than half a second after the first one it is an echo."""
    lines = ["try:", f"    {NOW}; {WAIT}", "finally:", "    time.sleep(0.6)", f"    {NOW}; {WAIT}"]
    assert interrupted(script(*lines), tmp_path, signal.SIGINT, signal.SIGTERM) == (130, "stopped\n")


def test_descendants_and_temporary_folders_go_with_the_process(tmp_path: Path) -> None:
    """A compiler has a session of its own."""
    lines = [
        "import subprocess, tempfile",
        "def compile():",
        f"    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):",
        "        child = subprocess.Popen(['sleep', '600'], start_new_session=True)",
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))",
        f"        {NOW}; threading.Event().wait()",
        "threading.Thread(target=compile, daemon=True).start()", WAIT,
    ]  # fmt: skip
    assert interrupted(script(*lines), tmp_path, signal.SIGTERM) == (143, "stopped\n")
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


def test_a_forked_process_has_its_own_signals(tmp_path: Path) -> None:
    lines = [
        "child = os.fork()", "if child == 0: time.sleep(600)",
        "os.kill(child, signal.SIGTERM)", "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)",
        NOW, WAIT,
    ]  # fmt: skip
    assert interrupted(script(*lines), tmp_path, signal.SIGINT) == (130, "-15\nstopped\n")


def test_help_and_refusals_keep_their_codes(tmp_path: Path) -> None:
    for words, code in ((["--help"], 0), (["generate", "--no-such"], 2), (["generate", "x", "--steps", "0"], 2)):
        run = subprocess.run(
            [sys.executable, "-m", "cli", *words], cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)),
            capture_output=True, text=True,
        )  # fmt: skip
        assert run.returncode == code and "Traceback" not in run.stderr, run


class Moment:
    """A command of the real program, and a moment of it: when it and its children have used so much CPU time."""

    def __init__(self, name: str, folder: Path, redis_url: str) -> None:
        self.name, self.folder = name, folder
        folder.mkdir(parents=True)
        (folder / "temporary").mkdir()
        captions = folder / "captions.tsv"
        captions.write_text("id\tcaption\n" + "".join(f"{k}\ta cat\n" for k in range(400)))
        model = ["--model", tiny.TINY]
        draws = [*model, "--steps", "2", "--guidance", "1"]
        self.words: list[str] = {
            "generate": ["a cat", "-n", "400", "-o", "out", *draws],
            "evaluate": ["--prompts", str(captions), "--out", "out", "--lens", "emoji-clip", *draws],
            "quantize": [*model, "--out", "out", "--limit", "500"],
            "tune": [
                "--prompts",
                str(captions),
                "--out",
                "out",
                "--plans",
                "plans.json",
                "--lens",
                "emoji-clip",
                *model,
            ],
            "mlperf": ["--prompts", str(captions), "--out", "out", "--scenario", "Offline", "--latent", "off", *model],
            "bench": ["ladder", *model],
            "chat": ["tell me of cats"],
            "worker": model,
            "api": ["--port", str(free_port())],
            "serve": ["--port", str(free_port()), "--data", str(folder / "data"), *model],
        }[name]
        self._environment = environment(
            ("DIPTYCH_TEXT_MODEL",) if name == "chat" else (), TMPDIR=str(folder / "temporary"),
            DIPTYCH_CACHE_DIR=str(folder / "cache"), PYTHONPATH=str(ROOT),
            **({"DIPTYCH_REDIS_URL": redis_url} if name in ("worker", "api") else {}),
        )  # fmt: skip

    def stop(self, number: signal.Signals, cpu_s: float) -> None:
        """Send the signal when so much CPU time is used, or when it is used up; check the end."""
        with (self.folder / "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "cli", self.name, *self.words], cwd=self.folder, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=err, stderr=err, text=True, start_new_session=True,
            )  # fmt: skip
        with killed_at_last(process):
            wait_until(lambda: _catches_sigterm(process.pid) or process.poll() is not None, "its handlers")
            self._wait(process, cpu_s)
            children = descendants(process.pid)
            process.send_signal(number)
            code = process.wait(PATIENCE_S)
        log = (self.folder / "err").read_text()
        for path in self.folder.glob("data/logs/*"):
            log += path.read_text()
        context = f"{self.name} {number.name} after {cpu_s:.1f} s of CPU time: {code}\n{log[-3000:]}"
        expected = 0 if number == signal.SIGTERM and self.name in SERVICES else CODES[number]
        assert code == expected or (code == 0 and _is_done(log)), context
        assert "Traceback" not in log and "terminate called" not in log and "Aborted" not in log, context
        alive = lambda: [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]  # noqa: E731
        wait_until(lambda: not alive(), f"the end of the children of {context}", PATIENCE_S)
        left = [path for path in self.folder.rglob("*") if path.name.endswith((".part", ".partial", ".tmp"))]
        left += [path for path in (self.folder / "temporary").iterdir() if path.suffix != ".lock"]  # which all share
        assert not left, (left, context)
        for picture in self.folder.rglob("out/**/*.png"):
            with Image.open(picture) as image:
                image.load()
        for table in self.folder.rglob("out/*.json"):
            if not table.name.startswith("mlperf_log_"):  # which LoadGen itself appends to while it runs
                json.loads(table.read_text())

    def _wait(self, process: subprocess.Popen[str], cpu_s: float) -> None:
        """Wait for this much CPU time, or until hardly any is used any more, as by a service that is ready."""
        used: list[float] = []

        def reached() -> bool:
            used.append(_cpu_s(process.pid))
            idle = len(used) > _IDLE_LOOKS and used[-1] - used[-_IDLE_LOOKS] < 0.1
            return process.poll() is not None or used[-1] >= cpu_s or (idle and used[-1] > 1.0)

        wait_until(reached, f"{cpu_s:.1f} s of CPU time of {self.name}")


def _is_done(log: str) -> bool:
    """Whether a command had come to its end before the signal did."""
    return "stopped" not in log


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *descendants(pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def _catches_sigterm(pid: int) -> bool:
    """Whether the process has a handler of SIGTERM, which Python by itself has not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is None or bool(int(match[1], 16) >> (signal.SIGTERM - 1) & 1)


LONGEST_S = {"serve": 14.0, "worker": 9.0}  # of CPU time, until there is nothing to be interrupted any more
MOST_S = 11.0


def moments(name: str, count: int) -> list[tuple[signal.Signals, float]]:
    """Return signals, and CPU seconds of a command after which they are sent."""
    draw = random.Random(name)
    spans = [LONGEST_S.get(name, MOST_S) * (k + draw.random()) / count for k in range(count)]
    return [(draw.choice([signal.SIGINT, signal.SIGTERM]), span) for span in spans]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a process's handlers from /proc")
@pytest.mark.parametrize("name", ["serve", "generate", "evaluate", "quantize", "worker"])
def test_a_command_stops_whatever_it_does(tmp_path: Path, redis_url: str, name: str) -> None:
    """One moment, while it loads; the long test has forty."""
    Moment(name, tmp_path / name, redis_url).stop(signal.SIGINT, random.Random(name).uniform(2.5, 5.0))


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a process's handlers from /proc")
@pytest.mark.parametrize("name", ["serve", "generate", "evaluate", "quantize", "worker"])
def test_a_command_stops_at_fortymoments(tmp_path: Path, redis_url: str, name: str) -> None:
    for k, (number, cpu_s) in enumerate(moments(name, 40)):
        Moment(name, tmp_path / f"{k}", redis_url).stop(number, cpu_s)


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a process's handlers from /proc")
@pytest.mark.parametrize("name", ["api", "chat", "mlperf", "tune"])
def test_every_other_command_stops_too(tmp_path: Path, redis_url: str, name: str) -> None:
    for k, (number, cpu_s) in enumerate(moments(name, 6)):
        Moment(name, tmp_path / f"{k}", redis_url).stop(number, cpu_s)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_output_that_cannot_be_written_is_no_success() -> None:
    """What is printed last is written at the exit: a key's token is told only once."""
    words = [sys.executable, "-m", "cli", "--version"]
    buffered = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, cwd=ROOT, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and "cannot be written" in done.stderr
