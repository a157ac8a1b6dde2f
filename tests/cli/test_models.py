"""`diptych models` where no service answers, or something else does, and `models add`. A running service is asked in
tests/deployment.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import huggingface_hub
import pytest
from safetensors.torch import save_file

from core.config import EMBEDDED_MODEL
from deployment.address import forget_url, write_url
from deployment.redis import free_port
from pipeline.checkpoints import tiny
from tests.cli.shell import Shell, made_with
from tests.http_server import Handler, LocalServer
from tests.pipeline.original_layout import checkpoint


def test_without_a_service_it_names_what_would_be_loaded(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("DIPTYCH_PORT", str(port))
    said = shell.done("models")
    assert said.err == ""
    assert said.out == f"{EMBEDDED_MODEL}  (would be loaded here; no service answers at http://127.0.0.1:{port})\n"


def test_a_service_that_is_named_must_answer(shell: Shell) -> None:
    said = shell("models", "--url", f"http://127.0.0.1:{free_port()}/")
    assert said.code == 1 and said.out == ""
    assert said.err.startswith("diptych: --url: no service answers (") and "refused" in said.err


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b'{"data": 1}', b'{"data": [{"id": "gpt"}]}', b"\xff"])
def test_what_is_no_diptych_is_seen(shell: Shell, body: bytes) -> None:
    class Page(Handler):
        def respond(self) -> None:
            self.answer(200, body)

    with LocalServer(Page) as server:
        said = shell("models", "--url", server.url)
    assert said.code == 2 and said.err == "diptych: --url: the server there is not Diptych\n"


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000", "", "http://[", "http://a b", "http://x:y"])
def test_what_is_no_url_is_refused(shell: Shell, url: str) -> None:
    said = shell("models", f"--url={url}")
    assert said.code in (1, 2) and said.err.startswith("diptych: --url: ")
    assert url.startswith("http") or said.err == "diptych: --url: must begin with http:// or https://\n"


@pytest.fixture
def store(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint and its base in the shell's folder; models are added to a folder beside them."""
    save_file(checkpoint(tiny.make(tiny.SHAPES[tiny.TINY], seed=3)), shell.folder / "mine.safetensors")
    tiny.save(shell.folder / "base", tiny.SHAPES[tiny.TINY])
    monkeypatch.setenv("DIPTYCH_MODELS_DIR", str(shell.folder / "store"))
    monkeypatch.setenv("DIPTYCH_PORT", str(free_port()))
    return str(shell.folder / "store")


def test_an_added_model_is_listed_and_drawn_by_its_name(shell: Shell, store: str) -> None:
    predicts = ("--prediction-type", "v_prediction", "--zero-snr")
    said = shell("models", "add", "mine.safetensors", "--base", "base", "--name", "cats", *predicts)
    sha256 = hashlib.sha256((shell.folder / "mine.safetensors").read_bytes()).hexdigest()
    assert said.code == 0 and said.out == f"{store}/cats\nsha256 {sha256}\ndiptych serve --model cats\n"
    assert "Writing model shards" not in said.err
    assert re.search(r"^cats  \(added; SDXL, [0-9]+ MB; --model cats loads it\)$", shell("models").out, re.MULTILINE)
    shell.done("generate", "x", "--model", "cats", "-o", "out", "--steps", "2")
    assert made_with(shell.pictures()[0])["steps"] == 2
    scheduler = json.loads((shell.folder / "store/cats/scheduler/scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction" and scheduler["rescale_betas_zero_snr"] is True


def test_models_are_added_to_the_data_folder(shell: Shell, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_MODELS_DIR")
    monkeypatch.setenv("HOME", str(shell.folder / "home"))
    (shell.folder / "home/.local/share/diptych/models/dogs").mkdir(parents=True)
    monkeypatch.setenv("DIPTYCH_DATA_DIR", str(shell.folder / "disk"))
    added = shell("models", "add", "mine.safetensors", "--base", "base", "--name", "cats")
    assert added.code == 0 and added.out.startswith(f"{shell.folder / 'disk/models/cats'}\n")
    listed = shell("models", "list").out
    assert "cats  (added; SDXL, " in listed and "dogs  (added" in listed
    for name, left in (("cats", "dogs"), ("dogs", None)):
        assert shell("models", "remove", name).code == 0
        listed = shell("models", "list").out
        assert f"{name}  (" not in listed and (left is None or f"{left}  (" in listed)


def test_a_file_that_is_not_there_or_lacks_its_base_is_told_so(
    shell: Shell, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _offline)
    for name in ("nofile.safetensors", "folder/mine.ckpt", "emoji.zip", "~nobody/mine.safetensors"):
        assert shell.refusal("models", "add", name) == f"diptych: model: {name}: no such file\n"
    for words in (["models", "add", "mine.safetensors"], ["convert", "mine.safetensors", "-o", "mine"]):
        message = shell.refusal(*words)
        assert "--base: stabilityai/stable-diffusion-xl-base-1.0: " in message
        assert "the hub cannot be reached" in message
        assert message.endswith("name its folder or hub id with --base\n")


def _offline(*_: object, **__: object) -> None:
    raise OSError("no network")


def test_the_service_of_a_data_folder_is_asked(
    shell: Shell, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on another port than the default; a killed one's address is as good as none."""

    class Page(Handler):
        def respond(self) -> None:
            card = {
                "live": True, "modality": "image", "precision": "int8", "device": "cpu", "native_size": "64x64",
            }  # fmt: skip
            loading = {"live": False, "loading": True, "modality": "text"}
            models = [{"id": "cats", "diptych": card}, {"id": "dogs", "diptych": loading}]
            self.answer(200, json.dumps({"data": models}).encode())

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.setenv("DIPTYCH_DATA_DIR", str(folder))
    with LocalServer(Page) as server:
        write_url(folder, server.url)
        assert shell("models").out == "cats  image, int8 on cpu, 64x64\ndogs  text  (being loaded)\n"
    assert f"no service answers at {server.url}" in shell("models").out
    forget_url(folder)
    assert "no service answers at http://127.0.0.1:" in shell("models").out


def test_models_of_this_machine_are_listed_and_added_ones_are_removed(shell: Shell, store: str) -> None:
    for name in ("cats", "dogs"):
        shell.done("models", "add", "base", "--name", name)
    said = shell("models", "list")
    names = [line.partition(" ")[0] for line in said.out.splitlines()]
    assert said.code == 0 and names[-2:] == ["cats", "dogs"] and {"emoji-xl", "emoji-lm"} <= {*names}
    assert "emoji-xl  (embedded; SDXL, 48 MB, int8; --model emoji-xl loads it)" in said.out
    assert shell("models", "remove", "cats")[:2] == (0, f"removed {store}/cats\n")
    assert [path.name for path in (shell.folder / "store").iterdir()] == ["dogs"]
    assert "cats" not in shell("models", "list").out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("emoji-xl", "NAME: emoji-xl is embedded: it is part of the package, and goes with it"),
        ("gone", "model: gone: there is no such model in "),
        ("../base", "model: ../base: there is no such model in "),
        (".downloads", "model: .downloads: there is no such model in "),
    ],
)
def test_what_is_no_added_model_is_not_removed(shell: Shell, store: str, name: str, told: str) -> None:
    (shell.folder / "store/.downloads").mkdir(parents=True)
    before = sorted(shell.folder.rglob("*"))
    said = shell("models", "remove", name)
    assert said.code == 2 and said.err.startswith(f"diptych: {told}") and sorted(shell.folder.rglob("*")) == before


@pytest.mark.parametrize("target", ["base", "/nowhere"])
def test_a_linked_model_keeps_its_name_until_it_is_removed_and_what_it_links_to_stays(
    shell: Shell, store: str, target: str
) -> None:
    (shell.folder / "store").mkdir()
    (shell.folder / "store/cats").symlink_to(shell.folder / target)
    assert "--name: there is a model cats already" in shell.refusal("models", "add", "base", "--name", "cats")
    shell.done("models", "remove", "cats")
    assert not list((shell.folder / "store").iterdir()) and (shell.folder / "base/model_index.json").is_file()


def test_what_an_interrupted_removal_left_goes_with_the_next(
    shell: Shell, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shell.folder / "store/cats").mkdir(parents=True)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        assert shell("models", "remove", "cats").code == 130
    assert len(list((shell.folder / "store").iterdir())) == 1 and "cats" not in shell("models", "list").out
    assert shell("models", "remove", "cats").code == 2
    assert not list((shell.folder / "store").iterdir())


@pytest.mark.quick(0)
@pytest.mark.parametrize(("scheme", "more"), [("int8", ("--limit", "1")), ("int8-dynamic", ())])
def test_it_is_quantized_into_its_own_folder(shell: Shell, store: str, scheme: str, more: tuple[str, ...]) -> None:
    said = shell.done("models", "add", "base", "--name", "cats", "--quantize", scheme, *more)
    assert f"layers in {scheme}" in said.out
    assert (shell.folder / f"store/cats/unet-{scheme}").is_dir() and not list((shell.folder / "base").glob("unet-*"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("gone.safetensors",), "diptych: model: gone.safetensors: no such file"),
        (("mine.safetensors", "--sha256", "0" * 64), "mine.safetensors: its SHA-256 is "),
        (("mine.safetensors", "--name", "emoji-xl"), "--name: there is a model emoji-xl already"),
        (("mine.safetensors", "--max-gib", "0"), "--max-gib: must be more than 0"),
        (("mine.safetensors", "--quantize", "int3"), "invalid choice: 'int3'"),
        (("http://example.com/x",), "must begin with https://"),
    ],
)
def test_what_cannot_be_added_is_named(shell: Shell, store: str, arguments: tuple[str, ...], told: str) -> None:
    assert told in shell.refusal("models", "add", *arguments, "--base", "base")
    assert "added" not in shell("models").out


def _file(header: bytes, data: bytes = b"") -> bytes:
    return b"HTTP/1.0 200 OK\r\nContent-Type: x/y\r\n\r\n" + len(header).to_bytes(8, "little") + header + data


def _keyed(key: str) -> bytes:
    return _file(json.dumps({key: {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}).encode())


_FORGED = "\x1b]0;mine\x07\x9b31m\u202e\x85 first\u2028\nsha256 " + 64 * "0" + "\r"
_OUTSIDE = {
    "a first key": _keyed(_FORGED),
    "a long key": _keyed("x" * 200_000),
    "an HTTP reason": b"HTTP/1.0 404 Not\x1b[31m\x9b\x85 Found " + b"x" * 50_000 + b"\r\n\r\n",
    "a name": b'HTTP/1.0 200 OK\r\nContent-Disposition: attachment; filename="\x1b[31m"\r\n\r\n<html>',
    "an address": b"HTTP/1.0 302 Found\r\nLocation: http://[\x1b[31m/\r\n\r\n",
    "a large header": b"HTTP/1.0 200 OK\r\n\r\n" + (90_000_000).to_bytes(8, "little") + b"{" + b"[]," * 10_000,
}


@pytest.mark.parametrize("kind", _OUTSIDE)
def test_what_a_server_sends_is_one_line_that_moves_no_cursor(
    kind: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_MODELS_DIR", str(shell.folder / "store"))

    class Page(Handler):
        def respond(self) -> None:
            self.wfile.write(_OUTSIDE[kind])
            self.close_connection = True

    with LocalServer(Page) as server:
        said = shell("models", "add", f"{server.url}/x.safetensors", "--base", "base")
    assert said.code == 2 and said.out == ""
    lines = said.err.split("\n")
    assert all(line.isprintable() and len(line) < 3000 for line in lines)
    assert sum(line.startswith("diptych: model: ") for line in lines) == 1
    assert not any(line.startswith("sha256") for line in lines)


def test_what_a_service_says_of_its_models_moves_no_cursor(shell: Shell) -> None:
    card = {"live": True, "modality": "image", "native_size": "1\n\x1b[31m", "precision": "\x9b", "device": "\u202e"}

    class Page(Handler):
        def respond(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": _FORGED, "diptych": card}]}).encode())

    with LocalServer(Page) as server:
        said = shell.done("models", "--url", server.url)
    assert said.out.count("\n") == 1 and said.out.rstrip("\n").isprintable()
