"""MLPerf Inference's text-to-image test: its protocol, its fixed latent, and the required ranges of its scores.

From the closed division's rules and reference implementation (mlcommons/inference, text_to_image, v4.0 to v5.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contract.plan import GUIDANCE_FIELDS
from contract.schedule import SCHEDULE_FIELDS

if TYPE_CHECKING:
    import torch

STEPS, GUIDANCE, SCHEDULER = 20, 8.0, "euler"
NEGATIVE = "normal quality, low quality, worst quality, low res, blurry, nsfw, nude"
CAPTIONS = 5_000
MODEL = "stable-diffusion-xl"  # what LoadGen's own configuration calls it
NATIVE = 1024
WINDOWS = {"fid": (23.01085758, 23.95007626), "clip-score": (31.68631873, 31.81331801)}


class ProtocolError(ValueError):
    """A file that the protocol needs cannot be used. The message names it."""


class FigureVerdict(NamedTuple):
    """The verdict on one figure. `within` is None if the figure is not the test's own: another network, model or
    number.
    """

    figure: str
    value: float | None
    low: float
    high: float
    within: bool | None


def read_latent(path: Path, shape: Sequence[int] | None = None) -> tuple[torch.Tensor, str]:
    """The starting latent, fp32 [1, C, h, w], and its file's digest. Raises `ProtocolError`.

    `shape` is what the model's pictures begin from; None: the caller checks it against the model.
    """
    import numpy as np
    import torch

    try:
        data = path.read_bytes()
        latent = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ProtocolError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, EOFError) as error:
        raise ProtocolError(f"{path}: cannot be read as .npy ({error})") from None
    if not isinstance(latent, np.ndarray) or latent.dtype != np.float32 or latent.ndim != 4 or latent.shape[0] != 1:
        description = f"{latent.dtype} {list(latent.shape)}" if isinstance(latent, np.ndarray) else "an archive"
        raise ProtocolError(f"{path}: must be one latent, float32 [1, C, h, w], not {description}")
    if not np.isfinite(latent).all():
        raise ProtocolError(f"{path}: holds NaN or infinite numbers")
    if shape is not None and list(latent.shape) != list(shape):
        raise ProtocolError(f"{path}: is {list(latent.shape)}, this model's images begin from {list(shape)}")
    return torch.from_numpy(latent.copy()), hashlib.sha256(data).hexdigest()


def verdicts(scores: Mapping[str, Any]) -> list[FigureVerdict]:
    """Compare `scores.json` with the closed division's windows.

    A figure is compared only if all 5,000 captions were generated at 1024×1024 by the protocol.
    """
    values: dict[str, float] = {name: score["value"] for name, score in scores["scores"].items()}
    for entry in scores["against"].values():
        if entry["kind"] == "statistics" or "fid" not in values:
            values |= {name: score["value"] for name, score in entry["scores"].items()}
    official = not unofficial(scores)
    lines = []
    for name, (low, high) in WINDOWS.items():
        value = values.get(name)
        within = low <= value <= high if official and value is not None else None
        lines.append(FigureVerdict(name, value, low, high, within))
    return lines


def unofficial(scores: Mapping[str, Any]) -> list[str]:
    """Return why a run's scores are not the test's, in words; empty if they are."""
    settings, reasons = scores["settings"], []
    if scores.get("stand_ins"):
        reasons.append(f"stand-ins for {', '.join(scores['stand_ins'])}")
    expected = {"steps": STEPS, "guidance_scale": GUIDANCE, "scheduler": SCHEDULER, "negative_prompt": NEGATIVE}
    reasons += [f"{name} is {settings.get(name)!r}" for name, value in expected.items() if settings.get(name) != value]
    if scores["pictures"] != CAPTIONS:
        reasons.append(f"{scores['pictures']} captions instead of {CAPTIONS}")
    if scores["lens"] != "mlperf":
        reasons.append(f"seen through {scores['lens']}")
    if settings.get("latent") is None:
        reasons.append("no fixed latent")
    if scores.get("side") != NATIVE:
        reasons.append(f"pictures of {scores.get('side')} pixels instead of {NATIVE}")
    if any(settings.get(name) is not None for name in GUIDANCE_FIELDS):
        reasons.append("guidance for a part of the steps")
    reasons += [f"{name} is given" for name in SCHEDULE_FIELDS if settings.get(name) is not None]
    if settings.get("deepcache") not in (None, "off"):
        reasons.append("DeepCache, which the open division allows")
    return reasons


def table(scores: Mapping[str, Any]) -> str:
    """The verdict as text."""
    words = {True: "within", False: "OUTSIDE", None: "not held against it"}
    lines = [
        f"{line.figure:12} {'–' if line.value is None else f'{line.value:.8g}':>12}   closed division: "
        f"{line.low:.8f} … {line.high:.8f}   {words[line.within]}"
        for line in verdicts(scores)
    ]
    reasons = unofficial(scores)
    lines += [f"not MLPerf's test: {'; '.join(reasons)}"] if reasons else []
    return "\n".join(lines)
