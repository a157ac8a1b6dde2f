"""The checker at the worker: what becomes of flagged pictures, whose word counts, and that no failure shows one."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import Image, new

from contract.content import ACTIONS, action_of
from contract.errors import Invalid
from contract.image import ImageJob, ImageParameters
from core import pictures
from core.artifacts import Artifacts
from core.batching.pending import Aborted
from core.config import Settings, SettingsError
from core.config import read as read_settings
from pipeline import content
from pipeline.checkpoints.folder import ModelError
from pipeline.content import ContentNetwork, Verdict
from pipeline.pixels.picture import Picture
from tests.pipeline import checkers
from tests.workers.crew import PATIENCE_S
from tests.workers.desk import JOB, drawn, read, result_of, torch_settings
from tests.workers.stage import handler_of
from workers.artifact_writer import ArtifactWriter
from workers.build import Runtime, build
from workers.handlers import Output
from workers.stages.checker import (
    CallableChecker,
    CheckerStage,
    CheckFailed,
    NetworkChecker,
    UnsafeImage,
    load,
)
from workers.tasks import _told

ASKED = {**JOB, "steps": 2, "guidance_scale": 1.0, "preview_every": 1}


class Doorman:
    """Lets in so many."""

    def __init__(self) -> None:
        self.left = 0
        self.seen: list[Image] = []
        self.fails = False

    def __call__(self, image: Image) -> bool:
        if self.fails:
            raise RuntimeError("he is ill")
        self.seen.append(image)
        self.left -= 1
        return self.left >= 0


@pytest.fixture(scope="module")
def doorman() -> Iterator[Doorman]:
    module = ModuleType("a_doorman")
    module.let_in, module.number = Doorman(), 7  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "a_doorman", module)
        yield module.let_in  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def runtime(doorman: Doorman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with build(torch_settings(data_dir=tmp_path_factory.mktemp("data"), checker="a_doorman:let_in")) as runtime:
        yield runtime


@pytest.fixture(autouse=True)
def well(doorman: Doorman) -> None:
    doorman.seen, doorman.fails = [], False


def pixels(data: bytes) -> Any:
    return np.asarray(pictures.read(data))


def job(runtime: Runtime, key_action: str = "", **changes: Any) -> Any:
    return read(runtime, {**ASKED, **changes}, key_action)


def pictures_of(runtime: Runtime, job: ImageJob) -> list[Any]:
    return drawn(runtime, handler_of(runtime).requests(job))


def result(runtime: Runtime, job: ImageJob, artifacts: Artifacts) -> tuple[list[dict[str, Any]], list[str]]:
    writer = ArtifactWriter(artifacts)
    return result_of(runtime, job, pictures_of(runtime, job), writer)["images"], writer.keys


def test_the_key_decides_over_the_service_and_a_request_only_for_more() -> None:
    for service, key, asked in itertools.product(ACTIONS, ("", *ACTIONS), ("", *ACTIONS)):
        expected = max(ACTIONS.index(key or service), ACTIONS.index(asked or "off"))
        assert action_of(service, key, asked) == ACTIONS[expected]
    with pytest.raises(Invalid):
        action_of("tag", "", "whatever comes next")


def flags(checker: NetworkChecker | CallableChecker, colour: int) -> bool:
    return checker.verdicts([plain(colour)])[0].flagged


@pytest.mark.parametrize("action", ACTIONS)
def test_previews_are_shown_of_what_may_not_be_hidden(runtime: Runtime, action: str) -> None:
    every = [request.preview_every for request in handler_of(runtime).requests(job(runtime, action))]
    assert every == [0 if action in ("blur", "refuse") else 1] * 2
    assert job(runtime).checker == "refuse", "what a service does that says nothing"


def test_a_refused_picture_has_no_file_and_others_of_its_job_do(runtime: Runtime, doorman: Doorman) -> None:
    doorman.left, artifacts = 1, Artifacts("memory://")
    (shown, refused), keys = result(runtime, job(runtime), artifacts)
    assert keys == [shown["key"]] and shown["content"] == {"flagged": False, "labels": {}, "action": None}
    assert {*refused} == {"seed", "width", "height", "warnings", "content"} and "refused" in refused["warnings"][-1]
    assert refused["content"] == {"flagged": True, "labels": {}, "action": "refuse"}


def test_a_job_whose_pictures_are_all_refused_fails_with_their_code(runtime: Runtime, doorman: Doorman) -> None:
    doorman.left, writer = 0, ArtifactWriter(Artifacts("memory://"))
    with pytest.raises(UnsafeImage) as caught:
        result_of(runtime, job(runtime), pictures_of(runtime, job(runtime)), writer)
    assert writer.keys == [] and _told(caught.value)[0] == "content_policy_violation"


def test_pixels_are_as_without_a_checker_unless_they_are_blurred(runtime: Runtime, doorman: Doorman) -> None:
    doorman.left, artifacts = 0, Artifacts("memory://")
    whole = [picture.png() for picture in pictures_of(runtime, job(runtime, "off", preview_every=0))]
    results = {action: result(runtime, job(runtime, action), artifacts)[0] for action in ("off", "tag", "blur")}
    stored = {action: [artifacts.get(image["key"]) for image in images] for action, images in results.items()}
    assert stored["off"] == stored["tag"] == whole and len(doorman.seen) == 4, "off asks nobody"
    assert ["content" in image for image in results["off"]] == [False, False]
    for image, data, original in zip(results["blur"], stored["blur"], whole, strict=True):
        assert image["content"]["action"] == "blur" and image["fingerprint"]["blurred"] == "a_doorman:let_in"
        assert (pixels(data) == np.asarray(content.blurred(pictures.read(original)))).all()
    doorman.seen[0].paste((0, 0, 0), (0, 0, 32, 32))
    again = [picture.png() for picture in pictures_of(runtime, job(runtime, "off", preview_every=0))]
    assert again == whole, "a checker can change nothing"


def test_a_checker_that_fails_shows_nothing(runtime: Runtime, doorman: Doorman) -> None:
    doorman.fails, writer = True, ArtifactWriter(Artifacts("memory://"))
    for action in ("tag", "blur", "refuse"):
        with pytest.raises(CheckFailed) as caught:
            result_of(runtime, job(runtime, action), pictures_of(runtime, job(runtime, action)), writer)
        assert _told(caught.value)[0] == "content_check_failed" and writer.keys == []


def test_a_worker_without_a_checker_draws_nothing_that_needs_one(tmp_path: Path) -> None:
    with build(torch_settings(data_dir=tmp_path)) as runtime:
        assert job(runtime).checker == job(runtime, "off").checker == "off" and handler_of(runtime).card().checker == ""  # type: ignore[union-attr]
        for key, asked in (("refuse", ""), ("tag", ""), ("", "blur")):
            with pytest.raises(CheckFailed, match="no checker"):
                job(runtime, key, checker=asked)


class Ill(ContentNetwork):
    """Flags bright pictures, and cannot judge one whose first pixel is its mark; notes its batches."""

    def __init__(self, most: int) -> None:
        self.digest, self.labels, self.device = "x", ("bright",), torch.device("cpu")
        self.batches: list[int] = []
        self.release = threading.Event()

    def prepare(self, image: Image) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float()

    def verdicts(self, pixels: torch.Tensor) -> list[Verdict]:
        assert self.release.wait(PATIENCE_S)
        self.batches.append(len(pixels))
        if (pixels[:, 0, 0, 0] == 13).any():
            raise RuntimeError("a picture that breaks it")
        return [Verdict(bool(each.mean() > 128), {}) for each in pixels]


def plain(colour: int) -> Image:
    return new("RGB", (8, 8), (colour, colour, colour))


@pytest.mark.parametrize("most", [1, 4])
def test_pictures_of_many_jobs_share_a_forward_and_no_failure(most: int) -> None:
    network = Ill(most)
    checker = NetworkChecker(network, PATIENCE_S, most)
    jobs: list[Sequence[int]] = [(200, 10), (13,), (250,), (20, 13), (140, 141, 9)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        waiting = [pool.submit(checker.verdicts, [plain(colour) for colour in each]) for each in jobs]
        network.release.set()
        for each, verdicts in zip(jobs, waiting, strict=True):
            if 13 in each:
                with pytest.raises(RuntimeError, match="breaks it"):
                    verdicts.result(PATIENCE_S)
            else:
                assert [verdict.flagged for verdict in verdicts.result(PATIENCE_S)] == [c > 128 for c in each]
    checker.close()
    assert max(network.batches) <= most and (most == 1 or max(network.batches) > 1)


def test_a_check_that_hangs_fails_its_job_and_holds_up_nothing_else() -> None:
    network = Ill(1)
    checker = NetworkChecker(network, 0.1, 1)
    for _ in range(2):  # the one that hangs, and one that waits behind it
        with pytest.raises(TimeoutError, match="DIPTYCH_CHECKER_S"):
            checker.verdicts([plain(10)] * 3)
    network.release.set()
    assert flags(checker, 200)
    assert network.batches == [1, 1], "of jobs that have failed nothing more is judged"
    checker.close()
    assert not any(thread.is_alive() for thread in checker._threads)


def test_calls_that_hang_on_every_thread_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    module, release = ModuleType("a_sleeper"), threading.Event()
    module.sleep = lambda image: release.wait(PATIENCE_S)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_sleeper", module)
    checker = CallableChecker("a_sleeper:sleep", 0.1)
    stage, job = CheckerStage(checker), ImageJob(ImageParameters("x", 1, 8, 8), checker="tag")
    for count in (len(checker._threads), 1):
        with pytest.raises(CheckFailed, match="TimeoutError"):
            stage.after(job, [Output(Picture(plain(10), job.picture, {}))] * count, lambda: False)
    release.set()
    assert not flags(checker, 10)
    checker.close()


def test_of_a_job_that_has_ended_nothing_more_is_judged() -> None:
    network, ended = Ill(1), threading.Event()
    checker = NetworkChecker(network, PATIENCE_S, 1)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(checker.verdicts, [plain(10)] * 3, ended.is_set)
        ended.set()
        with pytest.raises(Aborted):
            job.result(PATIENCE_S)
    network.release.set()
    assert flags(checker, 200) and len(network.batches) <= 2
    checker.close()


def test_a_folder_of_a_network_is_a_checker(tmp_path: Path) -> None:
    images = checkers.images(24)
    checkers.safety_checker(tmp_path / "safety", images)
    checkers.classifier(tmp_path / "vit")
    loaded = [load(Settings(checker=str(tmp_path / name)), "cpu") for name in ("safety", "vit")]
    for checker in loaded:
        assert checker is not None
        alone = list(itertools.chain.from_iterable(checker.verdicts([image]) for image in images))
        assert checker.verdicts(images) == alone, "a score depends on its picture alone"
        assert {verdict.flagged for verdict in alone} == {True, False}
        checker.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"checker": "no_such_module:x"}, "^checker no_such_module:x: cannot be imported"),
        ({"checker": "a_doorman:number"}, "^checker a_doorman:number: cannot be called"),
        ({"checker": "a_doorman:let_in", "checker_labels": "nsfw:0.5"}, "^checker_labels: .* is a callable"),
        ({"checker": "no/such/folder"}, "^checker: no/such/folder: no such folder"),
        ({"checker_action": "refuse"}, "^checker_action: there is no checker"),
    ],
)
def test_a_checker_that_is_not_there_is_said_before_anything_is_drawn(
    doorman: Doorman, settings: dict[str, str], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        load(Settings(**settings), "cpu")  # type: ignore[arg-type]


def test_by_default_there_is_none() -> None:
    assert read_settings().checker == "" and load(read_settings(), "cpu") is None
    assert load(Settings(checker_action="off"), "cpu") is None
    for labels in ("nsfw", "nsfw:", ":0.5", "nsfw:1", "nsfw:-1", "nsfw:nan", "a:0.5,b"):
        with pytest.raises(SettingsError, match=r"must look like nsfw:0\.5"):
            read_settings(checker_labels=labels)
    assert read_settings(checker_labels="nsfw:0.5, a b:c:0").checker_labels
