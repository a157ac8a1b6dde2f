"""Adds models to the folder in which they are found by name: from a file, an address, a folder or the hub."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from core.hub_cache import model_name
from pipeline.checkpoints import checkpoint, download, release_assets, single_file
from pipeline.checkpoints import folder as folders
from pipeline.checkpoints.folder import ModelError
from pipeline.checkpoints.single_file import CheckpointOptions
from pipeline.families import registry

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")
_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf", ".zip")
_DOWNLOADS = ".downloads"
_REMOVED = ".removed-"
_LEFT_OUT = shutil.ignore_patterns("*.bin", "*.ckpt", "*.pt", "*.pth", "*.msgpack", "*.onnx*", ".*")


class Added(NamedTuple):
    """The folder of a model, and the SHA-256 of the file that it was converted from; "" if it was a folder."""

    folder: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class AddOptions:
    """The options of adding a model.

    name: by which it will be found; "": the file's, folder's or repository's own.
    sha256: that the file must have, in hexadecimal; "": any.
    max_bytes: the largest file to download.
    variant: of a folder's weight files, such as fp16.
    is_taken: whether a name is another model's.
    """

    checkpoint: CheckpointOptions
    max_bytes: int
    name: str = ""
    sha256: str = ""
    variant: str | None = None
    is_taken: Callable[[str], bool] = lambda name: False
    say: Callable[[str], None] = lambda text: None
    count: Callable[[str, int, int], None] = lambda text, done, total: None


def add(source: str, store: Path, options: AddOptions) -> Added:
    """Put the model into the folder `store`. Nothing of it is left there if that fails but a broken download.

    source: a safetensors file of a checkpoint, its https address, a folder in diffusers' format, a hub id, or a
    model of `release_assets`: its name, or its archive's file or address elsewhere.

    Raises `ModelError`, naming the source, or the option, and what is wrong.
    """
    if options.sha256 and not re.fullmatch(r"[0-9a-fA-F]{64}", options.sha256):
        raise ModelError("--sha256: must be 64 hexadecimal digits")
    if options.name:
        _check_name(options.name, store, options)
    if asset := release_assets.named(source):
        return _add_asset(asset, source, store, options)
    if "://" in source:
        return _add_address(source, store, options)
    if file := _existing(source):
        return _add_file(file, source, store, options, file.stem)
    if Path(source).suffix.lower() in _FILES and not os.path.exists(source):  # noqa: PTH110 - of any name
        raise ModelError(f"{source}: no such file")
    if options.sha256:
        raise ModelError(f"--sha256: is of a file, and {source} is none")
    return Added(_add_folder(source, store, options), "")


def _add_asset(asset: release_assets.Asset, source: str, store: Path, options: AddOptions) -> Added:
    out = store / (options.name or _check_name(asset.name, store, options))
    if options.sha256.lower() not in ("", asset.sha256):
        raise ModelError(f"--sha256: {asset.name}.zip of this release has {asset.sha256}")
    if source != asset.name and "://" not in source:
        if file := _existing(source):
            return _unpack(file, source, out, asset, options)
        remedy = f"; {asset.remedy}" if asset.url else ""
        raise ModelError(f"{source}: no such file{remedy}")
    url = asset.url if source == asset.name else source
    if not url:
        raise ModelError(
            f"{source}: this build has no address of its release; give the file or address of {asset.name}.zip"
        )
    limits = download.DownloadOptions(
        min(options.max_bytes, asset.size_bytes), lambda file, size: None, lambda start: 0,
        lambda done, total: options.count("downloading", done, total),
    )  # fmt: skip
    try:
        file, _ = download.download(url, store / _DOWNLOADS, limits)
    except ModelError as error:
        raise ModelError(f"{error}; the file or another address of {asset.name}.zip can be given instead") from error
    try:
        return _unpack(file, download.redacted(url), out, asset, options)
    finally:
        download.remove(file)


def _unpack(file: Path, label: str, out: Path, asset: release_assets.Asset, options: AddOptions) -> Added:
    sha256 = _check_hash(file, label, asset.sha256, options)
    partial = _ensure_parent(out).with_name(f".{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(partial)
        (partial / asset.name).rename(out)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written ({error.strerror or error})") from error
    except zipfile.BadZipFile as error:
        raise ModelError(f"{label}: is no archive ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Added(out, sha256)


def _existing(source: str) -> Path | None:
    """Return the path of a file, or None if there is none."""
    try:
        file = Path(source).expanduser()
        return file if file.is_file() else None
    except (OSError, RuntimeError):  # a name too long, ~ of nobody
        return None


def _check_hash(file: Path, label: str, expected: str, options: AddOptions) -> str:
    """Return the file's SHA-256. Raises `_WrongHash` if it is not the expected one; "": any."""
    options.say("computing its SHA-256")
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if expected and sha256 != expected.lower():
        raise _WrongHash(f"{label}: its SHA-256 is {sha256}, not {expected.lower()}")
    return sha256


def _add_address(url: str, store: Path, options: AddOptions) -> Added:
    label = download.redacted(url)

    def check_start(file: Path, size_bytes: int) -> None:
        checkpoint.check_checkpoint(label, checkpoint.read_header(file, label, size_bytes))

    limits = download.DownloadOptions(
        options.max_bytes, check_start, checkpoint.header_bytes,
        lambda done, total: options.count("downloading", done, total),
    )  # fmt: skip
    file, name = download.download(url, store / _DOWNLOADS, limits)
    try:
        added = _add_file(file, label, store, options, name)
    except _WrongHash:
        download.remove(file)  # another download would bring the same
        raise
    download.remove(file)
    return added


class _WrongHash(ModelError):
    pass


def _add_file(file: Path, label: str, store: Path, options: AddOptions, name: str) -> Added:
    checkpoint.check_checkpoint(label, checkpoint.read_header(file, label))  # before it is read whole
    out = store / (options.name or _check_name(re.sub(r"[^\w.-]+", "-", name).strip("-."), store, options))
    sha256 = _check_hash(file, label, options.sha256, options)
    single_file.convert(file, _ensure_parent(out), options.checkpoint, name=label, say=options.say)
    return Added(out, sha256)


def _add_folder(source: str, store: Path, options: AddOptions) -> Path:
    local_folder = folders.local(source)
    options.say(f"reading {source}" if local_folder else f"downloading {source}")
    model_folder = folders.find(source, options.variant, lambda folder: registry.read(folder).parts)
    family = registry.read(model_folder)
    folders.check(model_folder, options.variant, family.parts, family.label)
    name = model_name(model_folder) if local_folder else Path(source).name
    out = _ensure_parent(store / (options.name or _check_name(name, store, options)))
    partial = out.with_name(f".{out.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # The hub's cache keeps files that nobody changes; a folder's owner may.
        shutil.copytree(model_folder, partial, ignore=_LEFT_OUT, copy_function=shutil.copy2 if local_folder else _link)
        partial.rename(out)
    except (OSError, shutil.Error) as error:
        raise ModelError(f"{out}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _link(source: str, target: str) -> None:
    try:
        os.link(Path(source).resolve(), target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _ensure_parent(out: Path) -> Path:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{out.parent}: cannot be made ({error.strerror})") from error
    return out


def _check_name(name: str, store: Path, options: AddOptions) -> str:
    if not _NAME.fullmatch(name):
        raise ModelError(f"--name: must be letters, digits, '.', '_' and '-', not {name[:100]!r}")
    if options.is_taken(name) or os.path.lexists(store / name):
        raise ModelError(f"--name: there is a model {name} already; give another")
    return name


def names(store: Path) -> list[str]:
    """Return the names of the models in the folder."""
    try:
        return sorted(path.name for path in store.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    except OSError:
        return []


def remove(name: str, store: Path) -> None:
    """Delete the model of this name from the folder. Raises `ModelError` if there is none, or it cannot be deleted.

    What an interrupted removal left is deleted too.
    """
    folder = store / name
    known = _NAME.fullmatch(name) is not None and (folder.is_symlink() or folder.is_dir())
    try:
        if known and folder.is_symlink():  # also one that leads nowhere
            folder.unlink()
        elif known:  # at once for readers, whatever happens meanwhile
            folder.rename(store / f"{_REMOVED}{secrets.token_hex(4)}")
    except OSError as error:
        raise ModelError(f"{name}: cannot be removed from {store} ({error.strerror})") from error
    for left in store.glob(f"{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)
        if left.exists():
            raise ModelError(f"{left}: what is left of a removed model cannot be deleted")
    if not known:
        raise ModelError(f"{name}: there is no such model in {store}")
