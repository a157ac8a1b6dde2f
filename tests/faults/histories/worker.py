"""Runs the worker of histories: that of tests/workers, with edits that depend on their input and readable texts.

python -m tests.faults.histories.worker [what tests.workers.stage takes]
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from contract.image import ImageJob
from core import config
from core.artifacts import Artifacts
from tests.workers import stage
from workers.artifact_writer import ArtifactWriter
from workers.handlers import Output
from workers.images.handler import pictures

LORAS = ("brush", "ink", "chalk", "wash", "coal", "pastel")  # that requests may name; the stand-in does not draw them


def edited(prompt: str, pixels: bytes) -> str:
    """The prompt whose picture the stand-in draws where it edits these pixels (RGB) by another one."""
    return f"{prompt} over {hashlib.sha256(pixels).hexdigest()}"


def main() -> int:
    artifacts = Artifacts(config.read().artifacts)

    def requests(handler: stage.StagePictures, job: ImageJob) -> list[Any]:
        handler.read_files(job)
        found = pictures(job, fetch=artifacts.get)
        return [
            one if one.edit is None else replace(one, prompt=edited(one.prompt, one.edit.image), edit=None)
            for one in found
        ]

    def answers(
        handler: stage.StageText, job: Any, outputs: Sequence[Output], artifact_writer: ArtifactWriter
    ) -> dict[str, Any]:  # fmt: skip
        choices = [
            {"text": output.value.text, "finish_reason": "stop", "tokens": 1, "logprobs": []} for output in outputs
        ]
        return {"choices": choices, "prompt_tokens": [1] * len(outputs)}

    plain = stage.StagePictures.card
    stage.StagePictures.card = lambda handler: replace(plain(handler), loras=LORAS)  # type: ignore[method-assign]
    stage.StagePictures.requests = requests  # type: ignore[method-assign]
    stage.StageText.build_result = answers  # type: ignore[method-assign]
    return stage.main()


if __name__ == "__main__":
    sys.exit(main())
