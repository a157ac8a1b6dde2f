"""The chart's rendered pods run, as processes in place of containers: their commands, settings, probes and signals.

A stand-in for a cluster: one host, folders for volumes, and ports of 127.0.0.1 for Services. Needs Helm.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployment.redis import free_port
from deployment.redis_programs import choose
from pipeline.checkpoints.tiny import TINY
from tests.deployment import scaling
from tests.deployment.served import ROOT, environment, wait_until
from tests.deployment.test_compose_settings import DOCKERFILE, image_environment
from tests.deployment.test_helm import needs_helm, render

VALUES = {"workers": [{"name": "cpu", "models": [TINY], "drainSeconds": 5}], "settings": {"DIPTYCH_LEASE_S": "2"}}
REPLACED = {"python": sys.executable, "diptych": f"{sys.executable} -m cli", "redis-server": str(choose().path)}
REDIS_CLI = shutil.which("redis-cli") or shutil.which("valkey-cli")


class Cluster:
    """The rendered objects, by kind and name, and where on this host what they name is."""

    def __init__(self, text: str, folder: Path) -> None:
        objects = [each for each in yaml.safe_load_all(text) if each]
        self.objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self.folder = folder
        self.redis_port = free_port()

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.objects["Secret", name]["data"][key]).decode()


class Pod:
    """The one pod of a Deployment or StatefulSet, as a process. `stage`: its image's in the Dockerfile, if any."""

    def __init__(self, cluster: Cluster, kind: str, name: str, stage: str = "") -> None:
        spec = cluster.objects[kind, name]["spec"]["template"]["spec"]
        (self.container,) = spec["containers"]
        self.grace_s: int = spec["terminationGracePeriodSeconds"]
        self.ports = {port["name"]: free_port() for port in self.container["ports"]} | {"redis": cluster.redis_port}
        claims = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
        self._places = {"r-diptych-redis:6379": f"127.0.0.1:{cluster.redis_port}", "0.0.0.0": "127.0.0.1"}
        for mount in self.container["volumeMounts"]:
            place = cluster.folder / ("claims" if mount["name"] in claims else name) / mount["name"]
            place.mkdir(parents=True, exist_ok=True)
            self._places[mount["mountPath"]] = str(place)
        self.variables = environment(unset=("DIPTYCH_TEXT_MODEL",)) | {"DIPTYCH_TEXT_MODEL": "off"}
        of_image = {key: value for key, value in image_environment(stage).items() if key.startswith("DIPTYCH_")}
        for key, value in (of_image | self._environment(cluster) if stage else self._environment(cluster)).items():
            self.variables[key] = self._placed(value)
        if stage:
            self.variables["DIPTYCH_PORT"] = str(self.ports.get("http", free_port()))
            self.variables["DIPTYCH_METRICS"] = f"127.0.0.1:{self.ports.get('metrics', 0)}"
            found = re.search(rf"AS {stage}\n.*?^CMD (\[.*?\])", DOCKERFILE, re.DOTALL | re.MULTILINE)
            assert found is not None
            command = [self._placed(word) for word in json.loads(found[1])]
            command[:1] = REPLACED[command[0]].split()
        else:
            *shell, script = self.container["command"]
            server = f"{REPLACED['redis-server']} - --port {cluster.redis_port} --bind 127.0.0.1"
            command = [*shell, script.replace("redis-server -", server, 1)]
        folder = Path(self._places.get("/data", ROOT))
        self.process = subprocess.Popen(command, env=self.variables, cwd=folder)

    def _environment(self, cluster: Cluster) -> dict[str, str]:
        """Its variables, with those that Secrets hold, and `$(NAME)` replaced as Kubernetes does."""
        found: dict[str, str] = {}
        for each in self.container["env"]:
            reference = each.get("valueFrom", {}).get("secretKeyRef")
            value = each["value"] if reference is None else cluster.secret(reference["name"], reference["key"])
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
        return found

    def _placed(self, value: str) -> str:
        for inside, outside in self._places.items():
            value = value.replace(inside, outside)
        return value

    def probe(self, name: str) -> bool:
        probe = self.container[name]
        if "exec" in probe:
            command = list(probe["exec"]["command"])
            command[0] = REPLACED.get(command[0], command[0])
            cli = f"{REDIS_CLI} -p {self.ports['redis']}"
            command = [word.replace("redis-cli", cli) for word in command]
            return subprocess.run(command, env=self.variables, cwd=ROOT, capture_output=True).returncode == 0
        if "tcpSocket" in probe:
            return True  # what a connection shows, the others show too
        try:
            url = f"http://127.0.0.1:{self.ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
            with urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def started(self) -> None:
        wait_until(lambda: self.process.poll() is not None or self.probe("startupProbe"), "a start")
        assert self.process.poll() is None
        assert self.probe("readinessProbe") and self.probe("livenessProbe")

    def stop(self) -> int:
        """SIGTERM; returns the exit code. Fails if it takes longer than its grace period."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.grace_s)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    done = render(tmp_path, VALUES)
    assert done.returncode == 0, done.stderr
    cluster, pods = Cluster(done.stdout, tmp_path), []

    def start(kind: str, name: str, stage: str = "") -> Pod:
        pods.append(Pod(cluster, kind, name, stage))
        return pods[-1]

    yield start
    for pod in pods:
        pod.process.kill()
        pod.process.wait()


def ask(api: Pod, path: str, body: Mapping[str, Any] | None = None, key: str = "") -> str:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{api.ports['http']}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


@needs_helm
@pytest.mark.skipif(REDIS_CLI is None, reason="there is no redis-cli (apt install redis-tools)")
def test_a_picture_is_drawn_scaling_is_told_and_all_end_in_time(started: Callable[..., Pod]) -> None:
    redis = started("StatefulSet", "r-diptych-redis")
    redis.started()
    api = started("Deployment", "r-diptych-api", "api")
    api.started()  # without a worker, which may be scaled to zero
    worker = started("Deployment", "r-diptych-worker-cpu", "worker")
    worker.started()
    drawn = json.loads(ask(api, "/v1/images/generations", {"prompt": "a cat", "steps": 2}))
    assert base64.b64decode(drawn["data"][0]["b64_json"]).startswith(b"\x89PNG")

    # As docs/kubernetes.md makes the key that KEDA reads /metrics with.
    words = [sys.executable, "-m", "cli", "keys", "add", "metrics", "--scopes", "admin"]
    made = subprocess.run(words, env=api.variables, cwd=ROOT, capture_output=True, text=True, check=True)
    key = re.search(r"dpt_[\w-]+", made.stdout)
    assert key is not None
    values = lambda: scaling.read(ask(api, "/metrics", key=key[0]), scaling.locations([TINY]))  # noqa: E731
    wait_until(lambda: values() == {"queued_0": 0, "running_0": 0, "ready": 1}, "what the API sees of Redis")

    redis_gone = redis.stop()
    assert redis_gone == 0 and not worker.probe("readinessProbe")
    assert worker.probe("livenessProbe") and api.probe("livenessProbe"), "nobody is restarted for Redis"
    assert api.stop() in (0, -signal.SIGTERM)
    assert worker.stop() == 0
