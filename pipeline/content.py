"""Networks that look at finished pictures: diffusers' safety checker, or any image classifier of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.digests import digest_of
from core.transfers import beside
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.folder import ModelError, Part
from pipeline.extensions.vision import image_processor

if TYPE_CHECKING:
    from PIL.Image import Image

_CHECKER = Part("encoder", ("StableDiffusionSafetyChecker",), "diffusers.pipelines.stable_diffusion.safety_checker")
_CLASSIFIER = Part("encoder", ("AutoModelForImageClassification",), "transformers.models.auto.modeling_auto")
_SPECIAL_CARE = np.float32(0.01)  # by which a concept of special care tightens all others
_UNSAFE = frozenset(
    ("nsfw", "porn", "pornographic", "pornography", "hentai", "sexy", "sexual", "explicit", "nude", "nudity", "unsafe",
     "gore", "violence", "violent")
)  # fmt: skip
_NEGATIONS = frozenset(("not", "non", "no", "safe"))
_THRESHOLD = 0.5  # of labels that are not named
_DIGITS = 4  # of a score, as results have it
_PROBE = 64  # pixels
_PROCESSOR = "preprocessor_config.json"
_PARTS = 8  # of a blurred picture's longer side


class Verdict(NamedTuple):
    """Whether a picture is flagged, and the scores of the labels that flag it, or else of the nearest one."""

    flagged: bool
    labels: Mapping[str, float]


class ContentNetwork:
    """A network in fp32 that flags a picture where a score is above its label's threshold. Thread-safe."""

    def __init__(
        self, folder: Path, part: Part, processor: Path, device: torch.device,
        reads: Callable[[Any], tuple[Mapping[str, float], Callable[[Tensor], Tensor]]],
    ) -> None:  # fmt: skip
        """`processor` is the folder of the image processor's config. `reads` returns of the network the thresholds by
        label, and what computes these labels' scores [B, labels] of pixels. Raises `ModelError`, naming the folder.
        """
        from PIL.Image import new

        from pipeline.checkpoints.load import load_part

        files = folders.check_part(folder, folder.name, part)
        self.digest, self.device = digest_of(folder, [folder / "config.json", *files]), device
        self._processor = image_processor(processor)
        network = load_part(folder.parent, folder.name, part, torch.float32, None).eval()
        with beside(device):  # the stream that reads what is computed here
            thresholds, self._scores = reads(network.to(device))
        self.labels, self._thresholds = (*thresholds,), np.array([*thresholds.values()], np.float32)
        try:
            self.verdicts(self.prepare(new("RGB", (_PROBE, _PROBE)))[None])
        except Exception as error:  # whatever the libraries raise: it does not run
            raise ModelError(f"{folder}: cannot check a picture ({folders.first_line(error)})") from error

    def prepare(self, image: Image) -> Tensor:
        """Compute the pixels that the network reads of a picture in RGB: [3, h, w] on the CPU."""
        pixels: Tensor = self._processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels

    @torch.inference_mode()
    def verdicts(self, pixels: Tensor) -> list[Verdict]:
        """Judge pictures [B, 3, h, w]; on a GPU in a stream beside the steps. Raises ValueError for scores that are no
        numbers, which would flag nothing.
        """
        with beside(self.device):
            scores = self._scores(pixels.to(self.device)).cpu().numpy()
        if not np.isfinite(scores).all():
            raise ValueError("its scores are not finite")
        return [self._verdict(row) for row in scores]

    def _verdict(self, scores: Any) -> Verdict:
        flagging = scores > self._thresholds
        indices = np.flatnonzero(flagging) if flagging.any() else [int(np.argmax(scores - self._thresholds))]
        return Verdict(bool(flagging.any()), {self.labels[k]: round(float(scores[k]), _DIGITS) for k in indices})


def load(folder: Path, device: torch.device, labels: Mapping[str, float]) -> ContentNetwork:
    """Load the safety checker or the classifier of a folder; `labels` flag a classifier's pictures, above these scores;
    none: those whose names say so. Raises `ModelError`.
    """
    where = folder.expanduser().absolute()
    if not where.is_dir():
        raise ModelError(f"{folder}: no such folder")
    where = where / "safety_checker" if (where / "safety_checker").is_dir() else where
    config = folders.read_json(where / "config.json")
    if _CHECKER.classes[0] in (config.get("architectures") or ()):
        if labels:
            raise ModelError(f"{where}: a safety checker has its own thresholds, and no labels")
        given = next((p for p in (where, where.parent / "feature_extractor") if (p / _PROCESSOR).is_file()), None)
        if given is None:
            raise ModelError(f"{where.parent}: feature_extractor/{_PROCESSOR} is missing")
        return ContentNetwork(where, _CHECKER, given, device, _read_safety_checker)
    if "auto_map" in config:
        raise ModelError(f"{where}/config.json: names code of its own (auto_map), which is not run")
    return ContentNetwork(where, _CLASSIFIER, where, device, lambda network: _read_classifier(where, network, labels))


def _read_safety_checker(network: Any) -> tuple[Mapping[str, float], Callable[[Tensor], Tensor]]:
    """Return thresholds and scores of diffusers' `StableDiffusionSafetyChecker`: by how much a picture's cosine with
    each unsafe concept exceeds the concept's threshold, to three digits. All are 0.01 higher where a concept of special
    care is exceeded.
    """
    concepts, special = (F.normalize(e) for e in (network.concept_embeds, network.special_care_embeds))
    least, least_special = network.concept_embeds_weights, network.special_care_embeds_weights

    def above(embedding: Tensor, others: Tensor, thresholds: Tensor) -> Any:
        return (embedding @ others.t()).cpu().numpy() - thresholds.cpu().numpy()

    def scores(pixels: Tensor) -> Tensor:
        embedding = F.normalize(network.visual_projection(network.vision_model(pixels)[1]))
        careful = (np.round(above(embedding, special, least_special), 3) > 0).any(1, keepdims=True)
        return torch.from_numpy(np.round(above(embedding, concepts, least) + _SPECIAL_CARE * careful, 3))

    return {f"concept {k}": 0.0 for k in range(len(concepts))}, scores


def _read_classifier(
    where: Path, network: Any, labels: Mapping[str, float]
) -> tuple[Mapping[str, float], Callable[[Tensor], Tensor]]:
    """Return thresholds and scores of an image classifier: its probabilities, as transformers' pipeline computes them.
    Raises `ModelError`.
    """
    config = network.config
    if config.problem_type == "regression":
        raise ModelError(f"{where}: is no classifier, but a regression")
    places = {str(name): index for index, name in config.id2label.items()}
    thresholds = labels or {name: _THRESHOLD for name in places if _unsafe(name)}
    known = ", ".join(places)[:300]
    if unknown := [name for name in thresholds if name not in places]:
        raise ModelError(f"checker_labels: {where} has no label {unknown[0]}; it has {known}")
    if not thresholds:
        raise ModelError(f"{where}: which of its labels flag a picture? DIPTYCH_CHECKER_LABELS names some of {known}")
    columns = [places[name] for name in thresholds]
    sigmoid = config.problem_type == "multi_label_classification" or config.num_labels == 1

    def scores(pixels: Tensor) -> Tensor:
        logits: Tensor = network(pixels).logits
        return (logits.sigmoid() if sigmoid else logits.softmax(-1))[:, columns]

    return thresholds, scores


def _unsafe(label: str) -> bool:
    """Return whether a label's name says that it is of what a checker is for."""
    words = {*re.split(r"[^a-z]+", label.lower())}
    return bool(words & _UNSAFE) and not words & _NEGATIONS


def blurred(image: Image) -> Image:
    """Return a picture of this size from the mean colours of at most 8 × 8 parts, from which nothing comes back."""
    from PIL.Image import Resampling

    longest = max(image.size)
    small = image.resize(
        (max(1, _PARTS * image.width // longest), max(1, _PARTS * image.height // longest)), Resampling.BOX
    )
    return small.resize(image.size, Resampling.BICUBIC)
