"""Decides about a cascade's drafts: scores them by their prompts on a thread of its own, beside the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

    from pipeline.clip_scorer import ClipScorer

_DIGITS = 4  # of a score, as results have it


class Gate:
    """Scores drafts with one CLIP. Thread-safe. Equal pictures and prompts have equal scores, whatever else waits."""

    def __init__(self, scorer: ClipScorer) -> None:
        self._scorer = scorer
        # One thread: OpenMP keeps a team of threads for every thread that computes.
        self._thread = ThreadPoolExecutor(1, "gate")

    @property
    def digest(self) -> str:
        """The digest of the CLIP's files."""
        return self._scorer.digest

    def scores(self, drafts: Sequence[tuple[Image, str]], stopped: Callable[[], bool] = lambda: False) -> list[float]:
        """The scores of pictures with their prompts, in order, rounded as results have them; fewer once `stopped`.

        One after another, so that jobs that wait at once take turns.
        """
        scores: list[float] = []
        for draft in drafts:
            if stopped():
                break
            scores.append(round(self._thread.submit(self._scorer.score, *draft).result(), _DIGITS))
        return scores

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
