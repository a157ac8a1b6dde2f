"""Runs drawn by a service: a real one draws the pictures that this process draws; one that stumbles is asked again."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.image import ImageParameters
from evaluation import service
from evaluation.run import EvaluationRun
from evaluation.sources import RemoteService, SourceError
from pipeline.checkpoints import tiny
from tests.cli.shell import Shell
from tests.deployment.served import Served
from tests.evaluation.conftest import CLIP, read_json, table
from tests.http_server import Handler, LocalServer

WANTED = ImageParameters("a fox", 7, 32, 32, steps=2)


@pytest.mark.long
def test_a_service_draws_what_this_process_draws(shell: Shell, tmp_path: Path) -> None:
    given = f"--prompts {table(shell.folder)}"
    whole = f"evaluate {given} --steps 2 --lens {CLIP} --resamples 10 --deterministic"
    text = f"mlperf {given} --panel text --max-tokens 8 --scenario Offline --mode accuracy"
    driven = f"mlperf {given} --scenario SingleStream --duration 0.5 --queries 64 --latent off"
    served = Served(tmp_path / "service", unset=("DIPTYCH_TEXT_MODEL",))

    def done(words: str) -> str:
        said = shell(*words.split())
        assert said.code == 0, said
        return said.out

    try:
        served.ready()
        there = f"--server {served.url} --out"
        done(f"{whole} {there} remote")
        done(f"{whole} --model {tiny.TINY} --threads 1 --out here --against remote")
        refused = shell(*f"{whole} {there} other --model nothing".split())
        assert refused.code == 1 and "no picture model nothing; there: " in refused.err
        assert "SingleStream: VALID (shortened)" in done(f"{driven} {there} log")
        done(f"{text} {there} told")
        done(f"{text} --out written")
    finally:
        served.close()
    told, written = (
        {entry["qsl_idx"]: entry for entry in read_json(shell.folder / one / "mlperf_log_accuracy.json")}
        for one in ("told", "written")
    )
    assert {k: v["token_count"] for k, v in told.items()} == {k: v["token_count"] for k, v in written.items()}
    assert all(bytes.fromhex(entry["data"]).decode() for entry in told.values())
    remote, local = EvaluationRun.read(shell.folder / "remote"), EvaluationRun.read(shell.folder / "here")
    assert remote.drawn_by["weights"] == local.drawn_by["weights"]
    scores = read_json(shell.folder / "here" / "scores.json")["against"]["remote"]["scores"]
    assert scores["psnr"]["value"] > 60 and scores["emoji-clip-fid"]["value"] == pytest.approx(0, abs=1e-3)


CARDS = [
    {"id": "words", "diptych": {"live": True, "modality": "text"}},
    {"id": "tiny", "diptych": {"live": True, "native_size": "32x32", "modality": "image"}},
]  # fmt: skip
Remote = tuple[list[Any], RemoteService]


@pytest.fixture
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    """The bodies that a service was sent, which gives these answers, one after the other, and then pictures."""
    monkeypatch.setattr(service, "_WAIT_S", (0.01, 0.05))
    answers, bodies = list(request.param), list[Any]()

    class Stumbling(Handler):
        def respond(self) -> None:
            if self.command == "GET":
                return self.answer(200, json.dumps({"data": CARDS}).encode())
            bodies.append(json.loads(self.body()))
            answer = answers.pop(0) if answers else 200
            if answer == "cut":
                self.close_connection = True
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{")
                return None
            picture = {"b64_json": base64.b64encode(b"a picture").decode(), "warnings": ["w"]}
            body = {"data": [picture]} if answer == 200 else {"error": {"message": "said so"}}
            return self.answer(answer, json.dumps(body).encode(), {"Retry-After": "0"})

    with LocalServer(Stumbling) as server:
        source = RemoteService(server.url, width=2)
        yield bodies, source
        source.close()


@pytest.mark.parametrize("remote", [(503, 429, 500, "cut")], indirect=True)
def test_who_stumbles_is_asked_again_for_the_same_picture(remote: Remote) -> None:
    bodies, source = remote
    ticks: list[None] = []
    drawn = source.take(source.submit(WANTED, lambda: ticks.append(None)).result(timeout=60))
    assert drawn == (b"a picture", ("w",)) and len(ticks) == 2
    assert len(bodies) == 5 and all(body == bodies[0] for body in bodies)
    assert bodies[0] == {
        "prompt": "a fox", "model": "tiny", "size": "32x32", "seed": 7, "steps": 2, "guidance_scale": 5.0,
        "deterministic": False, "deepcache": "off",
    }  # fmt: skip


@pytest.mark.parametrize("remote", [(400,)], indirect=True)
def test_a_refusal_is_not_asked_again(remote: Remote) -> None:
    bodies, source = remote
    with pytest.raises(SourceError, match="answered 400: said so"):
        source.submit(WANTED, lambda: None).result(timeout=60)
    assert len(bodies) == 1


@pytest.mark.parametrize("remote", [(503,) * 99], indirect=True)
def test_who_never_answers_is_given_up(remote: Remote) -> None:
    bodies, source = remote
    with pytest.raises(SourceError, match="answered 503"):
        source.submit(WANTED, lambda: None).result(timeout=60)
    assert len(bodies) == 8


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:1", "http://127.0.0.1:1"])
def test_no_service_is_said(url: str) -> None:
    with pytest.raises(SourceError, match=r"must begin with http|no service answers"):
        RemoteService(url)
