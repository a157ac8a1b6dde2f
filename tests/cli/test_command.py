"""Real commands, where imports and signals matter, also as process 1; and what `--help` says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from PIL import Image

from deployment.redis import free_port
from pipeline.checkpoints import tiny
from pipeline.sampling.samplers import SCHEDULERS
from tests.children import python_path
from tests.cli.shell import Shell
from tests.deployment.served import ROOT, environment, wait_until


def test_a_real_command_prints_a_path_and_nothing_that_is_not_for_its_user_and_ctrl_c_leaves_whole_pictures(
    tmp_path: Path, saved: Path
) -> None:
    """Two commands of one process, which imports torch once; the second is stopped amid its pictures."""
    first = ["generate", "a slice of pizza", "--model", str(saved), "--steps", "2", "--seed", "1"]
    second = ["generate", "a fox", "-n", "500", "--model", tiny.TINY, "--steps", "60", "--guidance", "1", "-o", "foxes"]
    code = (
        f"import cli, sys\nassert cli.main({first}) == 0\nprint('second', file=sys.stderr, flush=True)\n"
        f"sys.argv = ['diptych', *{second}]\ncli.entry()"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIPTYCH_")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        # Kernels are not for models this small.
        env={**env, "COLUMNS": "200", "PYTHONPATH": python_path(ROOT), "DIPTYCH_KERNELS": "0"},
    )  # fmt: skip
    until = time.monotonic() + 120
    while not list(tmp_path.glob("foxes/*.png")) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == "out/a-slice-of-pizza-1.png\n" and (tmp_path / out.strip()).is_file()
    before, _, err = err.partition("second\n")
    shown = [line for line in before.splitlines() if line.strip()]
    assert all(line.startswith(("steps ", "pictures ")) for line in shown), before
    found = list((tmp_path / "foxes").iterdir())
    assert found and "Traceback" not in err
    assert err.strip().splitlines()[-1] == f"stopped: {len(found)} of 500 pictures were written"
    for path in found:
        with Image.open(path) as image:
            image.load()


def test_it_says_which_version_it_is(shell: Shell) -> None:
    assert shell("--version") == (0, f"diptych {version('diptych')}\n", "")


def test_help_and_refusals_do_not_wait_for_torch() -> None:
    commands = [
        ["generate", "--help"], ["generate", "x", "--steps", "0"], ["generate"], ["serve", "--data", "/proc/nowhere"],
        ["api"], ["worker"], ["models", "--url", "http://127.0.0.1:9"],
    ]  # fmt: skip
    code = (
        f"import sys, cli\nfor words in {commands!r}:\n"
        "    try: code = cli.main(words)\n    except SystemExit as exit: code = exit.code\n"
        "    print('code', code, *({'torch', 'diffusers'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    codes = [line for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == [f"code {code}" for code in (0, 2, 2, 2, 2, 2, 1)], done


@pytest.mark.parametrize(
    "words",
    ["", "generate", "serve", "api", "worker", "models"],
)
def test_help_says_something_of_every_option(shell: Shell, words: str) -> None:
    check_help(shell, words)


def check_help(shell: Shell, words: str) -> None:
    """Assert that the help of a command has a text for each of its options."""
    said = shell.done(*words.split(), "--help")
    assert said.err == ""
    lines = said.out.splitlines()
    listed = [i for i, line in enumerate(lines) if re.match(r"  (-|\w)", line) and "diptych" not in line]
    assert listed
    for i in listed:
        below = lines[i + 1] if i + 1 < len(lines) else ""
        assert re.search(r"\S {2,}\S", lines[i].strip()) or below.startswith("    "), lines[i]


def test_help_is_grouped_and_begins_with_an_example(shell: Shell) -> None:
    text = shell("generate", "--help").out
    groups = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert groups[:5] == ["options", "picture", "inputs", "model", "speed"]
    parts = dict(zip(groups, re.split(r"^\w+:$", text, flags=re.MULTILINE)[1:], strict=True))
    for flag, group in {"--steps": "picture", "--mask": "inputs", "--variant": "model", "--precision": "speed"}.items():
        assert f"  {flag} " in parts[group], flag
    assert "  diptych evaluate sweep --prompts" in "\n".join(shell("evaluate", "sweep", "--help").out.splitlines()[:6])
    names = re.findall(r"^    (\S+)", shell("--help").out, re.MULTILINE)
    assert names[0] == "generate" and names.index("evaluate") + 2 == names.index("mlperf")


def test_help_names_every_scheduler_and_every_exit_code(shell: Shell) -> None:
    said = " ".join(shell("generate", "--help").out.split())
    assert all(name in said for name in SCHEDULERS)
    assert "exit codes: 0 all is drawn; 1 some pictures failed; 2 the input cannot be used" in said


PATIENCE_S = 60.0
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def _namespaces() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _namespaces(), reason="no namespace of processes can be made here")
def test_process_1_ends_at_sigterm_before_its_worker_loads() -> None:
    """The kernel drops signals without a handler there: it would be killed only after the grace period."""
    url = f"redis://127.0.0.1:{free_port()}/0"  # nobody listens: the worker waits for it, without a handler of its own
    command = [*NAMESPACE, sys.executable, "-m", "cli", "worker"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(DIPTYCH_REDIS_URL=url), stderr=subprocess.PIPE, text=True
    ) as unshare:
        try:
            assert unshare.stderr is not None and "trying until it does" in unshare.stderr.readline()
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
            os.kill(int(wait_until(children.read_text, "a child")), signal.SIGTERM)
            assert unshare.wait(PATIENCE_S) == 0
        finally:
            unshare.kill()
