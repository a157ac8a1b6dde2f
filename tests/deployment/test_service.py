"""`diptych serve` as it runs: what it draws, and that it mends what breaks. One real service for all tests."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from pipeline.checkpoints import tiny
from pipeline.checkpoints.load import load
from tests.cli.conftest import shell
from tests.deployment.served import ROOT, Served, environment, ready, wait_until
from tests.unet_opt.shapes import tiny_vae

__all__ = ["shell"]

README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def taesd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taesd")
    tiny_vae(8).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def service(taesd: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that is ready. What a test breaks, it waits to see mended."""
    variables = {"DIPTYCH_TINY_VAE": str(taesd), "DIPTYCH_LEASE_S": "5"}
    with ready(tmp_path_factory.mktemp("served"), unset=("DIPTYCH_TEXT_MODEL",), variables=variables) as service:
        yield service


def drawn_with(png: bytes) -> dict[str, object]:
    with Image.open(io.BytesIO(png)) as image:
        image.load()
        assert image.format == "PNG" and image.size == (32, 32)
        found = json.loads(image.text["diptych"])  # type: ignore[attr-defined]
    assert isinstance(found, dict)
    return found


def test_what_it_says_is_where_it_is_and_what_it_loads(service: Served) -> None:
    assert f"Diptych serves at {service.url} (random:tiny, fp32 on cpu, torch: the native kernels are" in service.out
    assert "; emoji-lm, fp32 on cpu, torch: the CPU kernels are turned off" in service.out
    first, *said = service.err.splitlines()
    assert first == "diptych: starting" and "diptych: worker: loading random:tiny" in said
    assert all(line.startswith("diptych: ") for line in said)  # no warnings, no escapes of a terminal


def test_a_job_is_drawn_again_to_the_bit_by_the_request_that_it_tells(service: Served) -> None:
    def drawn(fields: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        id = service.json("/v1/jobs", fields)["id"]
        png = service.finished(id)
        return service.json(f"/v1/jobs/{id}"), png

    fields = {"type": "image", "prompt": "a hat", "deterministic": True, "steps": 4, "plan": "auto", "size": "24x40"}
    first, png = drawn(fields)
    assert first["request"]["size"] == "24x40" and first["request"]["deepcache"] != "off"
    again, same = drawn(first["request"])
    assert same == png and again["request"] == first["request"]
    assert again["images"][0]["fingerprint"] == first["images"][0]["fingerprint"]
    assert drawn(fields)[1] != png, "another seed is drawn"


def test_the_command_that_it_prints_works_as_it_stands_there(service: Served, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    (command,) = [line for line in service.out.splitlines() if line.strip().startswith("curl")]
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert drawn_with((tmp_path / "pizza.png").read_bytes())["prompt"] == "a slice of pizza"


def test_the_readmes_request_gets_the_address_of_an_image(service: Served) -> None:
    request = re.search(r"    curl .*?}'\n", README, re.DOTALL)
    assert request is not None
    command = request[0].replace("http://127.0.0.1:8000", service.url)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=180)
    answer = json.loads(done.stdout)
    path = answer["data"][0]["url"].removeprefix(service.url)
    assert path == f"/v1/jobs/{answer['job_id']}/images/0" and answer["data"][0]["seed"] == 7
    assert drawn_with(service.call(path)[1])["seed"] == 7


def test_requests_choose_the_decoder(service: Served, taesd: Path) -> None:
    decoder = load(tiny.TINY, tiny_vae=str(taesd)).tiny_vae
    (model,) = [m["diptych"] for m in service.json("/v1/models")["data"] if m["diptych"]["modality"] == "image"]
    assert model["vaes"] == ["full", "tiny"] and model["costs"]["vae_tiny_s"] > 0
    fields = {"seed": 7, "prompt": "a fox"}
    pictures = {name: Image.open(io.BytesIO(service.picture(**fields, vae=name))) for name in ("full", "tiny")}
    told = {name: json.loads(one.text["fingerprint"]).get("vae-tiny") for name, one in pictures.items()}  # type: ignore[attr-defined]
    assert decoder is not None and told == {"full": None, "tiny": decoder.digest}
    assert pictures["full"].tobytes() != pictures["tiny"].tobytes()
    job = service.json("/v1/jobs", {"type": "image", **fields, "steps": 1000, "preview_every": 1, "n": 4})
    path = f"/v1/jobs/{job['id']}"
    seen = wait_until(lambda: (found := service.call(f"{path}/preview"))[0] == 200 and found[1], "a preview")
    assert "{}x{}".format(*Image.open(io.BytesIO(seen)).size) == model["native_size"]
    service.call(f"{path}/cancel", {})


# -- how it runs ---------------------------------------------------------------------------------------------------


def test_parts_are_nice_in_sessions_of_their_own_and_hide_the_password(service: Served) -> None:
    parts = {word: service.part(word) for word in ("redis", "api", "worker")}
    for part in parts.values():
        assert os.getsid(part.pid) == part.pid
        assert not any("redis://" in word for word in part.cmdline())
    mine = os.nice(0)
    assert [parts[word].nice() for word in ("redis", "api", "worker")] == [mine, mine, min(mine + 5, 19)]


def loaded(process: psutil.Process) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_only_the_worker_loads_torch(service: Served) -> None:
    assert "libtorch" in loaded(service.part("worker"))
    for process in (service.part("api"), psutil.Process(service.process.pid)):
        assert "libtorch" not in loaded(process)


def test_a_second_one_on_the_same_folder_is_refused(service: Served, serve: Callable[..., Served]) -> None:
    assert serve(folder=service.folder).process.wait(60) == 2
    assert "diptych: --data: another `diptych serve` uses this folder" in service.err
    assert "Traceback" not in service.err


def kill(service: Served, word: str) -> None:
    """kill -9, as when memory runs out; returns when its successor is there."""
    part = service.part(word)
    part.send_signal(signal.SIGKILL)
    part.wait(60)
    assert service.part(word).pid != part.pid


def test_an_api_that_dies_is_started_again_and_nobody_is_refused(service: Served) -> None:
    kill(service, "api")
    assert drawn_with(service.picture())["prompt"] == "a fox"
    assert "diptych: the API ended (killed by SIGKILL); starting it again in 0.5 s" in service.err
    wait_until(lambda: service.err.splitlines()[-1] == "diptych: ready again", "that it says so")


def test_a_redis_that_dies_comes_back_with_all_that_it_held(service: Served) -> None:
    job = service.json("/v1/jobs", {"type": "image", "prompt": "a hen", "steps": 2})
    first = service.finished(job["id"])
    kill(service, "redis")
    assert "diptych: Redis ended (killed by SIGKILL); starting it again in 0.5 s" in service.err
    # Not /readyz, which tells what the API saw of Redis up to a second ago.
    wait_until(lambda: service.answers(f"/v1/jobs/{job['id']}"), "a Redis that answers the API")
    assert service.finished(job["id"]) == first
    assert drawn_with(service.picture("a cow"))["prompt"] == "a cow"


def test_a_worker_that_dies_is_started_again_and_its_job_is_done(service: Served) -> None:
    job = service.json("/v1/jobs", {"type": "image", "prompt": "a goat", "steps": 200, "guidance_scale": 1})
    wait_until(lambda: service.json(f"/v1/jobs/{job['id']}")["status"] == "running", "a job in hand")
    kill(service, "worker")
    assert drawn_with(service.finished(job["id"]))["steps"] == 200
    assert "diptych: the worker ended (killed by SIGKILL); starting it again in" in service.err
    assert service.json(f"/v1/jobs/{job['id']}")["attempt"] > 1


def test_the_models_command_lists_what_it_offers(service: Served) -> None:
    wait_until(lambda: all(model["diptych"]["live"] for model in service.json("/v1/models")["data"]), "live models")
    done = subprocess.run(
        [sys.executable, "-m", "cli", "models", "--url", service.url], capture_output=True, text=True, timeout=60,
        env=environment(),
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].startswith("emoji-lm  text, fp32 on cpu, ") and done.stderr == ""
    assert lines[1:] == ["random:tiny  image, fp32 on cpu, 32x32"]
