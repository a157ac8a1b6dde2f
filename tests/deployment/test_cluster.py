"""The commands of docs/kubernetes.md on a real cluster: a release is installed, used, rolled out and removed.

`TEST_CLUSTER` is the registry prefix of images that the nodes have; `kubectl` and `helm` use their own
configuration. The cluster offers two volumes to claims without a storage class, or has a default class.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import yaml
from PIL import Image

from tests.deployment.served import ROOT, wait_until
from tests.test_readme import blocks

REGISTRY = os.environ.get("TEST_CLUSTER", "")
PAGE = (ROOT / "docs" / "kubernetes.md").read_text("utf-8").replace("registry.example/team", REGISTRY)
URL, JOBS = "http://127.0.0.1:8000", 24
SMALL = {  # a node of two cores holds all pods, also while a rollout starts another
    "api": {"resources": {"requests": {"cpu": "50m", "memory": "256Mi"}}},
    "workerDefaults": {
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "2"}},
        "drainSeconds": 20,
    },
    "redis": {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}},
    "artifacts": {"storage": {"accessModes": ["ReadWriteOnce"]}},
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not REGISTRY, reason="TEST_CLUSTER is not set: the registry prefix of images for a cluster"),
]


def shell(command: str, *, check: bool = True) -> str:
    """The output of a command line, which ends within ten minutes."""
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def page_command(heading: str, start: str) -> str:
    """The one command under a heading of the page that starts so."""
    (command,) = (line for line in blocks(heading, PAGE) if line.startswith(start))
    return command


@contextlib.contextmanager
def forwarded() -> Iterator[httpx2.Client]:
    """A client of the API by the page's `kubectl port-forward`, which ends with the pod that it leads to."""
    command = page_command("Install and remove", "kubectl -n pictures port-forward").removesuffix("&")
    with subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            with httpx2.Client(base_url=URL, timeout=300, trust_env=False) as client:

                def answers() -> bool:
                    with contextlib.suppress(httpx2.HTTPError):
                        return client.get("/healthz").is_success
                    return False

                wait_until(answers, "the forwarded API")
                yield client
        finally:
            process.terminate()


def await_rollout() -> None:
    """Waits until every pod of the release serves. The worker's command is the page's."""
    shell(page_command("Install and remove", "kubectl -n pictures rollout status") + " --timeout 9m")
    for part in ("deployment/pictures-diptych-api", "statefulset/pictures-diptych-redis"):
        shell(f"kubectl -n pictures rollout status {part} --timeout 9m")


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values") / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL), "utf-8")
    return path


@pytest.fixture(scope="module")
def release(values: Path) -> Iterator[None]:
    """The page's release, and its namespace, which is deleted at the end."""
    assert "pictures" not in shell("kubectl get namespaces -o name"), "there is a namespace `pictures` already"
    shell(page_command("Install and remove", "helm install") + f" --values {values}")
    try:
        await_rollout()
        yield
    finally:
        print(shell("kubectl -n pictures get all,pvc,networkpolicy -o wide", check=False))
        shell("kubectl delete namespace pictures --wait=false", check=False)


@pytest.fixture(scope="module")
def key(release: None) -> dict[str, str]:
    """The headers of the page's key. Before it is made, the forwarded port alone draws a picture."""
    with forwarded():
        body = json.loads(shell(page_command("Install and remove", "curl")))
        picture = Image.open(io.BytesIO(httpx2.get(body["data"][0]["url"], trust_env=False).content))
        assert picture.format == "PNG" and len(picture.convert("RGB").getcolors(1 << 20) or ()) > 100
    stranger = (
        "import urllib.request, urllib.error\n"
        "try: print(urllib.request.urlopen('http://pictures-diptych-api/v1/models').status)\n"
        "except urllib.error.HTTPError as error: print(error.code)\n"
    )
    assert shell(f'kubectl -n pictures exec deployment/pictures-diptych-api -- python -c "{stranger}"').strip() == "403"
    command = page_command("Install and remove", "kubectl -n pictures exec")
    headers = {"Authorization": f"Bearer {shell(command).splitlines()[0]}"}
    with forwarded() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers=headers).json()["data"]
    return headers


def await_success(client: httpx2.Client, key: dict[str, str], jobs: list[str]) -> None:
    """Waits until all jobs have succeeded. While Redis moves, the API answers 503."""

    def states() -> set[str]:
        answers = [client.get(f"/v1/jobs/{job}", headers=key) for job in jobs]
        return {each.json()["status"] if each.is_success else f"{each.status_code}" for each in answers}

    wait_until(lambda: not states() & {"queued", "running", "503"}, "the jobs' ends", 300)
    assert states() == {"succeeded"}


def create_jobs(client: httpx2.Client, key: dict[str, str]) -> list[str]:
    body = {"type": "image", "prompt": "a slice of pizza", "steps": 20}
    answers = [client.post("/v1/jobs", json=body | {"seed": seed}, headers=key) for seed in range(JOBS)]
    assert [answer.status_code for answer in answers] == [202] * JOBS, answers[0].text
    return [answer.json()["id"] for answer in answers]


def test_jobs_outlive_every_pod(key: dict[str, str]) -> None:
    for part in ("worker", "redis", "api"):
        with forwarded() as client:
            jobs = create_jobs(client, key)
        shell(f"kubectl -n pictures delete pod --selector app.kubernetes.io/component={part} --grace-period 1")
        await_rollout()
        with forwarded() as client:
            await_success(client, key, jobs)


def test_an_upgrade_loses_no_job(key: dict[str, str], tmp_path: Path) -> None:
    with forwarded() as client:
        jobs = create_jobs(client, key)
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump({part: {"podAnnotations": {"turn": "2"}} for part in ("api", "workerDefaults")}))
    for command in blocks("Failover and upgrades", PAGE):
        if "taint" not in command:
            shell(command + (f" --values {changed}" if command.startswith("helm upgrade") else ""))
    await_rollout()
    with forwarded() as client:
        await_success(client, key, jobs)


def test_removal_keeps_what_holds_jobs_and_then_nothing(key: dict[str, str]) -> None:
    shell(page_command("Install and remove", "helm uninstall") + " --wait")
    label = "--selector app.kubernetes.io/instance=pictures -o name"
    kept = shell(f"kubectl -n pictures get all,pvc,secret,configmap,networkpolicy,pdb,serviceaccount {label}").split()
    assert {name.partition("/")[0] for name in kept} <= {"persistentvolumeclaim", "secret", "pod"}
    assert sum(name.startswith("persistentvolumeclaim/") for name in kept) == 2
    shell(page_command("Install and remove", "kubectl -n pictures delete"))
    wait_until(lambda: not shell(f"kubectl -n pictures get all,pvc,secret {label}"), "their deletion", 120)
