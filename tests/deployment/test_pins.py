"""`make pins`: hashes from the real uv and a folder of wheels, digests from a real registry on the loopback interface.

Nothing leaves the machine. What needs `make build/tools/.installed` or Debian's docker-registry is skipped without.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from deployment.pins import FILES, HEAD, Unresolved, digest_of, pin_images, pin_packages
from deployment.redis import free_port
from tests.deployment.served import ROOT, wait_until
from tests.http_server import Handler, LocalServer
from tests.test_install import wheel

UV = ROOT / "build" / "tools" / "bin" / "uv"

PROJECT = """\
[project]
name = "house"
version = "1"
dependencies = ["panel>=1"]

[dependency-groups]
tools = ["hinge>=1"]
"""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, and a folder instead of an index with two versions of what it needs."""
    for version in ("1.0", "1.1"):
        wheel(tmp_path, "hinge", version)
    wheel(tmp_path, "panel", "2.0", needs="hinge")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.skipif(not UV.exists(), reason="no uv here: make build/tools/.installed")
def test_versions_stay_and_get_hashes(house: Path) -> None:
    constraints = house / "constraints.txt"
    constraints.write_text("hinge==1.0\n")
    assert pin_packages(house, str(UV)) == 0
    text = constraints.read_text()
    files = [house / f"{name}-py3-none-any.whl" for name in ("hinge-1.0", "panel-2.0")]
    told = [sha256(file.read_bytes()).hexdigest() for file in files]
    assert text == (
        f"{HEAD}hinge==1.0 \\\n    --hash=sha256:{told[0]}\n"
        f"    # via\n    #   house (pyproject.toml:tools)\n    #   panel\n"
        f"panel==2.0 \\\n    --hash=sha256:{told[1]}\n    # via house (pyproject.toml)\n"
    )
    before = constraints.stat().st_mtime_ns
    assert pin_packages(house, str(UV)) == 0
    assert constraints.stat().st_mtime_ns == before, "what is current is left alone"
    assert pin_packages(house, str(UV), upgrade=True) == 0 and "hinge==1.1" in constraints.read_text()
    (house / "pyproject.toml").write_text(PROJECT.replace("panel", "nowhere"))
    before_text = constraints.read_text()
    assert pin_packages(house, str(UV)) != 0 and constraints.read_text() == before_text
    assert not [path for path in house.iterdir() if path.name.startswith(".pins-")]


class Tokens(Handler):
    """Gives anybody a token, as Docker Hub does."""

    def respond(self) -> None:
        self.answer(200, json.dumps({"token": "anybody"}).encode())


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """The address of a registry that asks for a token: its own way to try clients out takes any."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no registry here: apt install docker-registry")
    port = free_port()
    with LocalServer(Tokens) as tokens:
        realm = f"{tokens.url}/token"
        (tmp_path / "registry.yml").write_text(
            f"version: 0.1\nlog: {{level: error}}\n"
            f"storage: {{filesystem: {{rootdirectory: {tmp_path / 'registry'}}}}}\n"
            f"http: {{addr: '127.0.0.1:{port}'}}\nauth: {{silly: {{realm: '{realm}', service: here}}}}\n"
        )
        process = subprocess.Popen(
            [program, "serve", tmp_path / "registry.yml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: listens(port), "the registry", 60)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/").close()
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    return True


def push(registry: str, name: str, tag: str) -> str:
    """Puts an image of one empty configuration there; its digest."""

    def send(method: str, url: str, data: bytes, kind: str) -> str:
        headers = {"Authorization": "Bearer anybody", "Content-Type": kind}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)) as answer:
            return str(answer.headers.get("Location", ""))

    config = b"{}"
    where = send("POST", f"http://{registry}/v2/{name}/blobs/uploads/", b"", "application/octet-stream")
    digest = f"sha256:{sha256(config).hexdigest()}"
    send("PUT", f"{where}&digest={digest}", config, "application/octet-stream")
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    part = {"mediaType": "application/vnd.docker.container.image.v1+json", "size": len(config), "digest": digest}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": part, "layers": [], "tag": tag}).encode()
    send("PUT", f"http://{registry}/v2/{name}/manifests/{tag}", manifest, kind)
    return f"sha256:{sha256(manifest).hexdigest()}"


def test_images_get_the_digest_of_their_tag(registry: str, tmp_path: Path) -> None:
    digests = {tag: push(registry, "some/redis", tag) for tag in ("7", "8")}
    docker, compose = (tmp_path / name for name in FILES)
    stale = "sha256:" + "0" * 64
    docker.write_text(f"FROM {registry}/some/redis:7 AS base\nRUN true\nFROM base AS api\n")
    compose.write_text(
        f"services:\n  a:\n    image: {registry}/some/redis:8@{stale}\n  b:\n    image: house-api # made here\n"
        f"  c:\n    image: {registry}/some/redis:9\n"
    )
    assert pin_images(tmp_path) == [f"{registry}/some/redis:9 stays as it is: {registry} answers 404"]
    assert docker.read_text() == (f"FROM {registry}/some/redis:7@{digests['7']} AS base\nRUN true\nFROM base AS api\n")
    assert compose.read_text() == (
        f"services:\n  a:\n    image: {registry}/some/redis:8@{digests['8']}\n  b:\n    image: house-api # made here\n"
        f"  c:\n    image: {registry}/some/redis:9\n"
    )


def test_a_registry_that_is_away_is_named() -> None:
    with pytest.raises(Unresolved, match=r"127\.0\.0\.1:9 does not answer"):
        digest_of("127.0.0.1:9/some/redis", "7")
