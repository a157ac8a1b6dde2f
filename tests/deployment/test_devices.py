"""A worker beside a GPU takes two CPU threads, before any library makes one for each core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from core.config import Settings
from core.threads import GPU_THREADS, cores
from deployment.devices import NoDevices, expects_gpu, gpu_of, near_cores, worker_environments

# The commands up to where the worker's process would boot, one after the other in an environment of its own each, and
# then what each build does first; the first environment stays the process's, as torch reads it once.
_STARTED = """
import json, logging, os, sys
import cli, workers.boot

booted, before = [], dict(os.environ)

def boot(settings):
    loaded = sorted({"torch", "numpy", "tokenizers"} & sys.modules.keys())
    limits = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OMP_WAIT_POLICY")}
    booted.append((settings, {"loaded": loaded, **limits}))

workers.boot.run = boot
for device, *options in json.loads(sys.argv[1]):
    os.environ["DIPTYCH_DEVICE"] = device
    assert cli.main(["worker", *options]) == 0
    os.environ.clear()
    os.environ.update(before)
import torch
from workers.devices import set_threads
logging.getLogger("workers").setLevel(logging.INFO)
for settings, told in booted:
    print("next", file=sys.stderr)
    set_threads(settings, settings.device)
    print(json.dumps(told | {"threads": torch.get_num_threads()}))
"""


def test_a_gpu_worker_limits_its_threads_before_torch_is_loaded_and_a_cpu_worker_keeps_all_cores(
    redis_url: str,
) -> None:
    starts = [["cpu"], ["cuda"], ["cuda", "--threads", "3"]]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "RAYON_", "OPENBLAS_"))}
    ran = subprocess.run(
        [sys.executable, "-c", _STARTED, json.dumps(starts)], capture_output=True, text=True, check=True,
        env=kept | {"DIPTYCH_REDIS_URL": redis_url, "DIPTYCH_COMPILE": "false"},
    )  # fmt: skip
    all_cores, *limited = map(json.loads, ran.stdout.splitlines())
    _, log, *logs = ran.stderr.split("next\n")
    assert all_cores == {
        "loaded": [], "threads": cores(), "OMP_NUM_THREADS": None, "RAYON_NUM_THREADS": None, "OMP_WAIT_POLICY": None,
    }  # fmt: skip
    assert "CPU threads" not in log
    for found, log, threads in zip(limited, logs, (GPU_THREADS, 3), strict=True):
        assert found == {
            "loaded": [], "threads": threads, "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }  # fmt: skip
        assert f"{threads} CPU threads beside cuda" in log
        assert ("DIPTYCH_THREADS sets it" in log) == (threads == GPU_THREADS)


@pytest.mark.parametrize(("device", "expected"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_a_named_device_is_what_it_says(device: str, expected: bool) -> None:
    assert expects_gpu(device, {"CUDA_VISIBLE_DEVICES": ""}) is expected


@pytest.mark.parametrize(("version", "visible", "expected"), [
    ("2.13.0", "0", True), ("2.13.0+cu130", "0", True), ("2.13.0+cpu", "0", False), ("2.13.0", "", False),
])  # fmt: skip
def test_auto_needs_a_gpu_and_a_torch_that_uses_it(
    version: str, visible: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    assert expects_gpu("auto", {"CUDA_VISIBLE_DEVICES": visible}) is expected


LISTED = "0, GPU-aa, 00000000:19:00.0\n1, GPU-bb, 00000000:9B:00.0\n2, GPU-cc, 00000000:C1:00.0\n"


def test_a_gpus_processors_are_those_of_its_numa_node(tmp_path: Path) -> None:
    for bus, node in (("0000:19:00.0", "0"), ("0000:9b:00.0", "1"), ("0000:c1:00.0", "-1")):
        (tmp_path / "bus/pci/devices" / bus).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / bus / "numa_node").write_text(f"{node}\n")
    for node, listed in ((0, "0-3,8-9\n"), (1, "4\n")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(listed)
    cores_of = {name: near_cores(name, tmp_path, lambda: LISTED) for name in ("0", "GPU-bb", "1", "2", "3", "")}
    assert cores_of == {"0": {0, 1, 2, 3, 8, 9}, "GPU-bb": {4}, "1": {4}, "2": set(), "3": set(), "": set()}
    assert near_cores("0", tmp_path / "nothing", lambda: LISTED) == set()
    for failed in ("", "NVIDIA-SMI has failed because it could not communicate with the driver.", "a, b\n,,,\n"):
        assert near_cores("0", tmp_path, lambda failed=failed: failed) == set()


@pytest.mark.parametrize(
    ("device", "visible", "gpu"),
    [("auto", "3,5", "3"), ("cuda", "3,5", "3"), ("cuda:1", "3,5", "5"), ("cuda:2", "3,5", ""), ("cuda", "", "")],
)
def test_the_gpu_of_a_worker_follows_from_its_device(device: str, visible: str, gpu: str) -> None:
    assert gpu_of(device, {"CUDA_VISIBLE_DEVICES": visible}) == gpu


def test_a_worker_has_the_gpus_of_its_text_model() -> None:
    settings = Settings(text_parallel="tp2", metrics="127.0.0.1:9000")
    workers = [own for _, own in worker_environments(settings, {}, ["0", "1", "4", "GPU-5"])]
    assert [own["CUDA_VISIBLE_DEVICES"] for own in workers] == ["0,1", "4,GPU-5"]
    assert [own["DIPTYCH_METRICS"] for own in workers] == ["127.0.0.1:9000", "127.0.0.1:9001"]
    with pytest.raises(NoDevices, match="DIPTYCH_TEXT_PARALLEL=tp2 takes 2 GPUs a worker, and there are 3"):
        list(worker_environments(settings, {}, ["0", "1", "2"]))
