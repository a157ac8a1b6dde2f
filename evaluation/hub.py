"""Loads feature networks from folders in transformers' format, plain or as the hub's cache lays them out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from evaluation.inception import WeightsError


def snapshot(folder: Path) -> Path:
    """The folder that holds `config.json`: this one, or of a hub cache's `models--ORGANISATION--NAME` the snapshot that
    `refs/main` names.
    """
    if (folder / "config.json").is_file():
        return folder
    main = folder / "refs" / "main"
    return folder / "snapshots" / main.read_text("utf-8").strip() if main.is_file() else folder


def name_of(folder: Path) -> str:
    """What a folder's model is called."""
    return folder.resolve().name.rpartition("--")[2]


def load(kind: Any, folder: Path, what: str) -> Any:
    """A network of this class of transformers, in fp32, without gradients. Raises `WeightsError`.

    Weights that are missing in the file would be drawn at random, and are refused.
    """
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # it would overwrite our own
    logging.set_verbosity_error()  # what is missing or superfluous is told below
    try:
        model, told = kind.from_pretrained(
            snapshot(folder), dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{folder}: is not a {what} ({str(error).splitlines()[0]})") from None
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    if told["missing_keys"]:
        raise WeightsError(f"{folder}: is not a {what} (no {sorted(told['missing_keys'])[0]})")
    return model.eval().requires_grad_(False)


def digest_of(model: Any) -> str:
    """A digest of a network's weights."""
    whole = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole.update(name.encode() + value.contiguous().cpu().numpy().tobytes())
    return whole.hexdigest()
