"""Edits in batches, and with prompts that are expanded: each test on an API of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.config import Settings
from core.jobs.record import JobState
from tests.api import test_batches
from tests.api.easel import Easel
from tests.api.test_batches import ended, told
from tests.api.test_edits import EDITS, as_file, bomb, handed_on, hole, pixels
from tests.api.test_expand import TEXT, expand, served
from tests.api.test_references import ZEROS, inline, uploaded
from tests.api.world import CARD, Api, Worker, client_of


def begin(api: Api, *bodies: dict[str, Any]) -> str:
    """The id of a batch of these edits."""
    with client_of(api.url) as client:
        return str(test_batches.begin(client, test_batches.lines(*bodies, url=EDITS), EDITS).id)


def end(api: Api, id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The responses to the lines of a batch that ends, well and ill."""
    with client_of(api.url) as client:
        batch = ended(client, id)
        files = (batch.output_file_id, batch.error_file_id)
        well, ill = (
            {line["custom_id"]: line["response"] for line in told(client, file)} if file else {} for file in files
        )
    assert batch.status == "completed" and batch.endpoint == EDITS
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(well), len(ill))
    return well, ill


def test_a_batch_edits_line_by_line(alone: tuple[Api, Worker]) -> None:
    api, worker = alone
    with Easel(worker) as easel:
        arrays = [pixels(seed=k) for k in range(3)]
        names = [uploaded(api, as_file(array)) for array in arrays]
        lines = uploaded(api, b"{}", purpose="batch")
        id = begin(
            api,
            {"prompt": "one", "images": [names[0]], "seed": 1, "steps": 4},
            {"prompt": "two", "images": [names[1]], "mask": inline(as_file(hole())), "seed": 2, "steps": 4, "n": 2},
            {"prompt": "no file", "images": [{"file_id": ZEROS}]},
            {"prompt": "no picture", "images": [lines]},
            {"prompt": "no images"},
            {"prompt": "bomb", "images": [inline(bomb(20_000, 20_000))]},
            {"prompt": "three", "images": [names[2]], "strength": 0.5, "seed": 3, "steps": 4, "stream": True},
        )
        well, ill = end(api, id)
        said = {name: (line["status_code"], line["body"]["error"]["param"]) for name, line in ill.items()}
        assert said == {
            "c2": (404, "images.file_id"), "c3": (400, "images.file_id"), "c4": (400, "images"), "c5": (400, "images"),
        }  # fmt: skip
        assert [(name, len(line["body"]["data"])) for name, line in well.items()] == [("c0", 1), ("c1", 2), ("c6", 1)]
        assert [claim.parameters["prompt"] for claim in easel.seen] == ["one", "two", "three"]
        assert [claim.parameters["edit"]["strength"] for claim in easel.seen] == [0.8, 1.0, 0.5]
        assert all(np.array_equal(handed_on(worker, claim)[0], arrays[k]) for k, claim in enumerate(easel.seen))


def test_an_edit_may_have_its_prompt_expanded_at_every_door(settings: Settings) -> None:
    with served(settings, (CARD, TEXT)) as (api, worker):
        fields = {"prompt": "a cat", "images": [inline()], "expand_prompt": True, "seed": 1}
        id = api.order(type="edit", **fields)
        job = expand(worker)
        assert job.id == id and job.parameters["expand_prompt"] is True and job.parameters["edit"]["image"]
        assert api.job(id)["images"][0]["revised_prompt"] == "a cat, the 0th ☂"
        batch = begin(api, fields)
        expand(worker, {id})
        (line,) = end(api, batch)[0].values()
        assert line["body"]["data"][0]["revised_prompt"] == "a cat, the 0th ☂"
        assert all(worker.is_(one, JobState.SUCCEEDED) for one in worker.ids())
