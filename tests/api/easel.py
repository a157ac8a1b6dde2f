"""A worker that draws at once what is queued: plain coloured pictures, with previews on the way, into the real store.

For tests of what people see. It can be told to go slowly, to wait, or to fail.
"""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from PIL import Image

from contract.content import as_recorded
from core.jobs.record import Claim, ProgressReport
from tests.api.world import Worker, eventually

T = TypeVar("T")


def asked(worker: Worker, call: Callable[..., T], *arguments: Any, **fields: Any) -> tuple[str, Future[T]]:
    """The id of the job that a call makes, and what the call returns once the job has ended."""
    known = worker.ids()
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(call, *arguments, **fields)
    pool.shutdown(wait=False)
    (id,) = eventually(lambda: worker.ids() - known)
    return id, answer


def drawn(worker: Worker, claim: Claim, images: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A job's images as their record has them, with these fields, of the bytes `data`."""
    p, made = claim.parameters, []
    for k, image in enumerate(images):
        data = image.get("data", b"%d" % k)
        made.append({
            "key": worker.artifacts.put(data, "image/png"), "seed": p["seed"] + k, "width": p["width"],
            "height": p["height"], "media_type": "image/png", "size_bytes": len(data), "warnings": [],
            **{name: value for name, value in image.items() if name != "data"},
        })  # fmt: skip
    return made


def conclude(worker: Worker, id: str, *images: dict[str, Any], **result: Any) -> Claim:
    """End a job well with images of `drawn`; its claim."""
    claim = worker.take(id)
    result["images"] = drawn(worker, claim, images)
    assert worker.store.leases.succeed(id, claim.attempt, result)
    return claim


class Easel:
    """Draws while the context is open."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.step_s = 0.0
        self.go = threading.Event()
        self.go.set()
        self.looked = threading.Event()  # a picture with previews ends once this is set: with its end they are gone
        self.looked.set()
        self.failing = False
        self.refused: set[int] = set()  # which images of a job its checker refuses
        self.seen: list[Claim] = []
        self.drawing = threading.Lock()  # held by whoever draws
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="easel")

    @property
    def last(self) -> dict[str, Any]:
        """The parameters of the newest job."""
        return self.seen[-1].parameters

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def previewed(self, events: Iterable[T]) -> list[T]:
        """The events of a stream that has begun, whose picture ends once the first preview was read. To be called with
        `looked` clear from before the request.
        """
        seen = []
        for event in events:
            seen.append(event)
            self.looked.set()
        return seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.go.set()
        self.looked.set()
        self._thread.join()

    def _run(self) -> None:
        taken: set[str] = set()
        while not self._over.wait(0.02):
            with self.drawing:
                if self.go.is_set():
                    self._draw_all(taken)

    def _draw_all(self, taken: set[str]) -> None:
        for id, _ in self.worker.messages():
            if id not in taken:
                taken.add(id)
                claim = self.worker.store.leases.claim(id, self.worker.name)
                if claim is not None:
                    self._draw(claim)

    def _draw(self, claim: Claim) -> None:
        self.seen.append(claim)
        p, previews = claim.parameters, False
        for step in range(1, p["steps"] + 1):
            if self.step_s and self._over.wait(self.step_s):
                return
            data = {"steps_done": step * p["n"], "steps": p["steps"] * p["n"], "image": 0, "images_done": 0}
            looks = {}
            if p.get("preview_every") and step % p["preview_every"] == 0 and step < p["steps"]:
                looks = {k: base64.b64encode(self._picture(claim, k, 8)).decode() for k in range(p["n"])}
                data["previews"] = list(looks)
                previews = True
            if self.worker.store.leases.report([ProgressReport(claim.id, claim.attempt, data, looks)]).stale:
                return  # cancelled
        if previews:
            self.looked.wait()
        if self.failing:
            self.worker.store.leases.fail(claim.id, claim.attempt, "engine_error", "the engine failed at this job")
            return
        pictures = [self._picture(claim, k, p["width"]) for k in range(p["n"])]
        images = drawn(self.worker, claim, [{"data": data, "fingerprint": {"model": "easel"}} for data in pictures])
        for k in self.refused:
            for name in ("key", "media_type", "size_bytes", "fingerprint"):
                del images[k][name]
        result = as_recorded({"images": images, "deepcache": p.get("deepcache", "off")})
        self.worker.store.leases.succeed(claim.id, claim.attempt, result)

    @staticmethod
    def _picture(claim: Claim, k: int, side: int) -> bytes:
        seed = claim.parameters["seed"] + k
        stream = io.BytesIO()
        Image.new("RGB", (side, side), (seed % 200, seed // 7 % 200, 120)).save(stream, "PNG")
        return stream.getvalue()
