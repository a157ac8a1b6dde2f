"""Tests core/artifacts.py on real folders and in memory: keys, atomicity, and what is said when a disk refuses."""

import contextlib
import hashlib
import io
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest
from obstore.store import GCSStore, S3Store

from core.artifacts import ArtifactError, Artifacts, NoArtifact, Spool, media_type

PNG = "image/png"
DATA = b"\x89PNG a picture" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()
KEY = f"sha256/{DIGEST[:2]}/{DIGEST[2:]}.png"


@pytest.fixture(params=["folder", "memory"])
def artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> Artifacts:
    return Artifacts((tmp_path / "new" / "a b").as_uri() if request.param == "folder" else "memory://")


def whole(artifacts: Artifacts, data: bytes) -> str:
    return artifacts.put(data, PNG)


def spooled(artifacts: Artifacts, data: bytes) -> str:
    with contextlib.closing(artifacts.spool()) as spool:
        for at in range(0, len(data), 1000):
            spool.write(data[at : at + 1000])
        return artifacts.put_spool(spool, PNG, lambda key: True)


def handed_in(artifacts: Artifacts, data: bytes) -> str:
    return artifacts.put_spool(Spool.of(io.BytesIO(data)), PNG, lambda key: True)


class Put(Protocol):
    """A way to put bytes."""

    __name__: str

    def __call__(self, artifacts: Artifacts, data: bytes) -> str: ...


WAYS = [whole, spooled, handed_in]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_key_is_the_content(artifacts: Artifacts, tmp_path: Path) -> None:
    assert artifacts.put(DATA, PNG) == KEY
    assert artifacts.put(DATA + b".", PNG) != artifacts.put(DATA, PNG)


@pytest.mark.parametrize("put", WAYS)
def test_what_is_there_is_not_written_again(put: Put, tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path.as_uri())
    path = tmp_path / put(artifacts, DATA)
    before = path.stat()
    put(artifacts, DATA)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(files(tmp_path)) == 1


DAMAGE = [b"", bytes(len(DATA)), DATA[:-1] + b"?", DATA + b"."]


@pytest.mark.parametrize("put", WAYS)
@pytest.mark.parametrize("left", DAMAGE, ids=["cut short", "zeros of its size", "one byte", "longer"])
def test_what_a_power_cut_left_is_written_anew(put: Put, left: bytes, tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path.as_uri())
    path = tmp_path / put(artifacts, DATA)
    path.write_bytes(left)
    with pytest.raises(ArtifactError, match="damaged"):
        artifacts.get(KEY)
    assert artifacts.get(put(artifacts, DATA)) == DATA
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("put", WAYS)
def test_a_link_is_replaced_by_the_artifact(put: Put, tmp_path: Path) -> None:
    """Even one that leads to the very same bytes: they are another's, and may change."""
    (tmp_path / "elsewhere").write_bytes(DATA)
    artifacts = Artifacts((tmp_path / "in").as_uri())
    path = tmp_path / "in" / put(artifacts, DATA)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert artifacts.get(put(artifacts, DATA)) == DATA and not path.is_symlink()


@pytest.mark.parametrize("put", WAYS)
def test_many_parts_of_a_large_one(put: Put, artifacts: Artifacts) -> None:
    data = DATA * 500
    assert artifacts.get(put(artifacts, data)) == data


def ran(program: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the folder's URL, behind the words of another command."""
    words = [*before, sys.executable, "-c", program, folder.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.quick(0, 2)
@pytest.mark.skipif(shutil.which("strace") is None, reason="there is no strace")
@pytest.mark.parametrize("put", WAYS)
def test_it_is_on_the_disk_before_anybody_is_told(put: Put, tmp_path: Path) -> None:
    """The bytes before the name, the name before the return."""
    program = f"""
import sys
from core.artifacts import Artifacts
from tests.core.test_artifacts import {put.__name__}
{put.__name__}(Artifacts(sys.argv[1]), b"x" * 5000)
"""
    calls = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,rename,renameat,renameat2"]
    order = [line for line in ran(program, tmp_path, *calls).stderr.splitlines() if str(tmp_path) in line]
    renamed = next(k for k, line in enumerate(order) if "rename" in line)
    assert any("fsync" in line for line in order[:renamed])
    assert any("fsync" in line for line in order[renamed:])


def test_many_at_once_may_put_the_same(artifacts: Artifacts, tmp_path: Path) -> None:
    going = threading.Barrier(8)

    def put(_: int) -> list[str]:
        going.wait(30)
        keys = []
        for number in range(20):
            keys.append(artifacts.put(DATA + bytes([number]), PNG))
            assert artifacts.get(keys[-1]) == DATA + bytes([number])  # seen whole, whoever wrote it
        return keys

    with ThreadPoolExecutor(8) as crowd:
        (keys,) = {tuple(keys) for keys in crowd.map(put, range(8))}
    assert len(set(keys)) == 20
    assert set(files(tmp_path / "new" / "a b")) in (set(keys), set())  # nothing half-written is left


FORGED = [
    "", "sha256", "/etc/passwd", "../secret", "sha256/../../secret", f"/{KEY}", f"{KEY}/", f"{KEY}\n", f" {KEY}",
    f"sha256/../{KEY}", KEY.replace("sha256", "."), KEY.upper(), KEY.removesuffix(".png"), f"{KEY}.png",
    KEY.replace(".png", ".txt"), KEY.replace("/", "//"), KEY.replace("/", "\\"), KEY.replace("/", "%2f"), f"{KEY}\0",
    KEY[:-5] + ".png", "file:///etc/passwd", KEY.replace(KEY[10], "٣"),
]  # fmt: skip


@pytest.mark.parametrize("key", FORGED)
def test_a_forged_key_reads_nothing(key: str, tmp_path: Path) -> None:
    artifacts = Artifacts((tmp_path / "in").as_uri())
    artifacts.put(DATA, PNG)
    (tmp_path / "secret").write_bytes(b"secret")
    for ask in (artifacts.get, media_type):
        with pytest.raises(NoArtifact) as caught:
            ask(key)
        assert len(key) < 3 or key not in str(caught.value)


def test_a_link_does_not_pass_for_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    artifacts = Artifacts((tmp_path / "in").as_uri())
    path = tmp_path / "in" / artifacts.put(DATA, PNG)
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(ArtifactError):
        artifacts.get(KEY)


def test_nothing_there_is_said_so(artifacts: Artifacts) -> None:
    with pytest.raises(NoArtifact, match="does not exist"):
        artifacts.get(KEY)


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError, match=r"cannot open .*: (not a directory|file exists)"):
        Artifacts((tmp_path / "file" / "folder").as_uri())


def test_a_folder_that_is_no_longer_one(tmp_path: Path) -> None:
    artifacts = Artifacts((tmp_path / "folder").as_uri())
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(ArtifactError, match=r"cannot write .*: not a directory"):
        artifacts.put(DATA, PNG)


@pytest.mark.parametrize("put", WAYS)
def test_a_disk_that_takes_no_more(put: Put, tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk: the write fails half-way, and nothing is left of it."""
    program = f"""
import resource, signal, sys
from core.artifacts import ArtifactError, Artifacts
from tests.core.test_artifacts import {put.__name__}
artifacts = Artifacts(sys.argv[1])
{put.__name__}(artifacts, b"small")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    {put.__name__}(artifacts, bytes(100_000))
except ArtifactError as error:
    sys.stdout.write(str(error)[:200])
"""
    assert ran(program, tmp_path).stdout == "cannot write an artifact: file too large"
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize(
    ("url", "kind", "prefix"),
    [("s3://bucket/a/path", S3Store, "a/path"), ("s3://bucket", S3Store, None), ("gs://bucket/path", GCSStore, "path")],
)
def test_object_stores_are_taken_with_their_bucket_and_path(
    url: str, kind: type[S3Store | GCSStore], prefix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "nowhere-1")
    store = Artifacts(url)._store
    assert isinstance(store, kind) and store.prefix == prefix
    assert store.config["bucket"] == url.split("/")[2]


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://host/path", "file:relative", "file://host/path"])
def test_a_url_of_no_use_is_refused(url: str) -> None:
    with pytest.raises(ArtifactError):
        Artifacts(url)


def test_only_known_media_types_are_kept(artifacts: Artifacts) -> None:
    with pytest.raises(KeyError):
        artifacts.put(DATA, "text/html")
