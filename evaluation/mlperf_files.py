"""Files that MLPerf's text-to-image test reads: each by its published name and SHA-256, checked before a run begins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from evaluation import captions, fid, mlperf
from evaluation.clip import Clip
from evaluation.inception import WEIGHTS as WEIGHTS
from evaluation.inception import Inception, WeightsError, digest_of_file
from evaluation.mlperf import ProtocolError
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.load import seeded
from pipeline.families import registry

CAPTIONS, LATENT, STATISTICS = "captions_source.tsv", "latents.npy", "val2014.npz"
CLIP = "clip-vit-base-patch32"
MODEL_FOLDER, MODEL_FILE = "stable-diffusion-xl-base-1.0", "sd_xl_base_1.0.safetensors"
MISSING = "is missing"
LATENT_SIDE = mlperf.NATIVE // 8
SOURCES = {
    CAPTIONS: "github.com/mlcommons/inference, text_to_image/coco2014/captions",
    LATENT: "the same, text_to_image/tools/latents.pt, saved by numpy as float32",
    STATISTICS: "the same, text_to_image/tools",
    WEIGHTS: "github.com/mseitzer/pytorch-fid, release fid_weights",
    CLIP: "huggingface.co/openai/clip-vit-base-patch32",
    MODEL_FOLDER: f"huggingface.co/stabilityai/stable-diffusion-xl-base-1.0; or {MODEL_FILE} of the same place",
}
_FEATURES = 2048  # of Inception
_DIGESTS: dict[str, tuple[str, ...]] = {
    CAPTIONS: ("2eeb95637b30fe5af26dd644bafa7affe4e5472ad0bda32d0feb1bd261280d5e",),
    # Of the values alone: how numpy writes a header depends on its version.
    LATENT: ("ea2c5d770d8921c79b43fade2dcecab9c95baae0500f5a2bc860ceb45faeccb1",),
    WEIGHTS: ("6726825d",),  # as much as the file's name says
    CLIP: ("a63082132ba4f97a80bea76823f544493bffa8082296d62d71581a4feff1576f",),
    MODEL_FILE: ("31e35c80fc4829d14f90153f4c74cd59c90b779f6afe05a74cd6120b893f7e5b",),
    "unet": (
        "357650fbfb3c7b4d94c1f5fd7664da819ad1ff5a839430484b4ec422d03f710a",
        "83e012a805b84c7ca28e5646747c90a243c65c8ba4f070e2d7ddc9d74661e139",  # fp16
    ),
}


class FileCheck(NamedTuple):
    """A file that was looked at. `wrong` says why it cannot be used, "" that it can; `stand_in` that it can, although
    it is not the published one; `told` is its SHA-256, as far as it is known.
    """

    name: str
    path: Path
    wrong: str = ""
    stand_in: bool = False
    digest: str = ""

    @property
    def line(self) -> str:
        """The finding as text."""
        if self.wrong:
            return f"{self.name}: {self.wrong}; from {SOURCES[self.name]}"
        state = (
            "a stand-in" if self.stand_in else "as published" if self.digest else "no checksum is published, it fits"
        )
        return f"{self.name}: {state}" + (f" (SHA-256 {self.digest[:16]}…)" if self.digest else "")


def check_all(files: Path, model: str | None, variant: str | None, *, stand_ins: bool = False) -> list[FileCheck]:
    """Look at everything that a run needs: `files` holds it under the published names, but for a `model` elsewhere.

    Other files than the published ones are wrong, or with `stand_ins` stand-ins. A missing file is always wrong.
    """
    findings = [
        _checked(name, files / name, read)
        for name, read in (
            (CAPTIONS, _captions), (LATENT, _latent), (STATISTICS, _statistics), (WEIGHTS, _inception), (CLIP, _clip),
        )
    ]  # fmt: skip
    findings.append(_model(files, model, variant))
    return [finding if stand_ins else _refused(finding) for finding in findings]


def model_of(files: Path, model: str | None) -> str:
    """The path behind `--model`: as given, or else the folder or the file among `files`."""
    named = files / MODEL_FILE
    return model or str(named if named.is_file() and not (files / MODEL_FOLDER).is_dir() else files / MODEL_FOLDER)


def _refused(finding: FileCheck) -> FileCheck:
    if not finding.stand_in:
        return finding
    reason = (
        f"its SHA-256 is {finding.digest}, not the published one" if finding.digest else "is not the published model"
    )
    return finding._replace(wrong=reason, stand_in=False)


def _checked(name: str, path: Path, read: Callable[[Path], str | None]) -> FileCheck:
    """`read` returns a file's digest, None where none is published, and raises the errors of unusable ones."""
    if not path.exists():
        return FileCheck(name, path, MISSING)
    try:
        digest = read(path)
    except (captions.PromptsError, ProtocolError, fid.FidStatisticsError, WeightsError, OSError) as error:
        return FileCheck(name, path, str(error).removeprefix(f"{path}: "))
    if digest is None:
        return FileCheck(name, path)
    return FileCheck(name, path, stand_in=not digest.startswith(_DIGESTS[name]), digest=digest)


def _captions(path: Path) -> str:
    captions.read(path)
    return digest_of_file(path)


def _latent(path: Path) -> str:
    latent, _ = mlperf.read_latent(path)
    return hashlib.sha256(latent.numpy().tobytes()).hexdigest()


def _statistics(path: Path) -> None:
    fid.read(path, _FEATURES)


def _inception(path: Path) -> str:
    return Inception(path).digest


def _clip(folder: Path) -> str:
    Clip(folder)
    return digest_of_file(
        next(folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).exists())
    )


def _model(files: Path, model: str | None, variant: str | None) -> FileCheck:
    name = model_of(files, model)
    path = Path(name)
    if seeded(name):
        return FileCheck(MODEL_FOLDER, path, stand_in=True)
    if path.is_file():
        digest = digest_of_file(path)
        return FileCheck(MODEL_FOLDER, path, stand_in=digest not in _DIGESTS[MODEL_FILE], digest=digest)
    if not path.is_dir():
        return FileCheck(MODEL_FOLDER, path, MISSING)
    try:
        family = registry.read(path)
        _, weights = folders.check(path, variant, family.parts, family.label)
        unet = weights.get("unet", [])
    except ModelError as error:
        return FileCheck(MODEL_FOLDER, path, str(error))
    digest = digest_of_file(unet[0]) if len(unet) == 1 else ""
    return FileCheck(MODEL_FOLDER, path, stand_in=digest not in _DIGESTS["unet"], digest=digest)
