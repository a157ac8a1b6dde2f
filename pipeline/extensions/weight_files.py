"""Lists the safetensors files of a folder, checks their headers, and reads their tensors."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from contract.loras import is_name, name_error, normal
from contract.printable import printable
from pipeline.checkpoints import safetensors_header
from pipeline.checkpoints.folder import ModelError, first_line
from pipeline.checkpoints.safetensors_header import TensorTable

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
PICKLES = (".bin", ".ckpt", ".pt", ".pth")
_reported: set[Path] = set()  # entries whose reason the log has
PICKLE = "is a pickle, which could run code; convert it to safetensors"


def _none(path: Path) -> bool:
    return False


def offered(folder: Path, also: Callable[[Path], bool] = _none, beside: Callable[[Path], bool] = _none) -> list[str]:
    """The `normal` names of the folder's files, and of folders in it that `also` takes, sorted; none if it cannot be
    read. Folders that are `beside` hold what the files need, and are offered by no name.
    """
    try:
        entries = [*folder.iterdir()]
    except OSError:
        return []
    names = {path: normal(path.name) for path in entries if also(path)}
    names |= {path: normal(path.name.removesuffix(SUFFIX)) for path in entries if path.name.endswith(SUFFIX)}
    for path in set(entries) - _reported:
        if path not in names and beside(path):
            continue
        if reason := _not_offered_reason(path, names.get(path)):
            _reported.add(path)
            log.warning("%s is not offered: %s", printable(str(path)), reason)
    return sorted({*filter(is_name, names.values())})


def path_of(folder: Path, name: str, suffix: str = SUFFIX) -> Path:
    """Return the path of the entry that `offered` lists by this name, whose own may have another form."""
    path = folder / f"{name}{suffix}"
    if path.name.isascii() or os.path.lexists(path):
        return path
    with suppress(OSError):
        return next((entry for entry in folder.iterdir() if normal(entry.name) == normal(path.name)), path)
    return path


def _not_offered_reason(path: Path, name: str | None) -> str:
    """Return why requests cannot use an entry of a folder that looks as if it held weights, or "". `name` is what they
    would call it; None if it has no form that is offered.
    """
    if path.name.startswith("."):  # hidden on purpose
        return ""
    if name is not None:
        reason = name_error(name)
        return f"its name {reason}" if reason else ""
    if path.suffix in PICKLES:
        return f"it {PICKLE}"
    if path.suffix.lower() == SUFFIX:
        return f"its name ends in {path.suffix}, not {SUFFIX}"
    try:
        nested = path.is_dir() and any(entry.name.endswith(SUFFIX) for entry in path.iterdir())
    except OSError:
        return ""
    return "only files right in the folder are" if nested else ""


def is_file(path: Path) -> bool:
    """Return whether it is a file; `Path.is_file` raises for a folder that may not be read, as a disk's lost+found."""
    try:
        return path.is_file()
    except OSError:
        return False


def tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a file's bytes, `in_16_bits`. Raises ValueError for a pickle and for a damaged file.

    Reads the safetensors format itself: the library copies all tensors in one call that holds the GIL, which other
    threads wait for.
    """
    try:
        return {name: in_16_bits(tensor) for name, tensor in _views(data).items()}
    except MemoryError:
        raise
    except Exception as error:  # also of torch: damaged, or of another kind
        raise ValueError(_damage(data[:2], error)) from error


def check_header(path: Path) -> None:
    """Read a file's header, without its tensors. Raises OSError, and ValueError as `tensors`."""
    try:
        safetensors_header.read(path)
    except ValueError as error:
        with path.open("rb") as stream:
            raise ValueError(_damage(stream.read(2), error)) from error


def _damage(start: bytes, error: Exception) -> str:
    if start[:1] == b"\x80" or start[:2] == b"PK":  # pickle's own files, and torch's
        return PICKLE
    return f"is damaged or cut short ({first_line(error)[:200]})"


def table_of(data: bytes) -> tuple[TensorTable, int]:
    """The header of a safetensors file, and where its tensors begin. Raises ValueError for a file without one."""
    end = safetensors_header.header_end(data[:8])
    if end > len(data):
        raise ValueError("it is cut short within its header")
    return safetensors_header.parse(data[8:end]), end


def _views(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, all in one copy of its bytes. They lie one behind another, without gaps."""
    import numpy as np
    import torch

    types = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
        "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    }  # fmt: skip
    table, start = table_of(data)
    if len(data) - start != table.size_bytes:
        raise ValueError(f"it has {len(data) - start} bytes of tensors, and {table.size_bytes} are in its header")
    views: dict[str, Tensor] = {}
    buffer = np.frombuffer(data, np.uint8, offset=start).copy()
    for name, entry in table.tensors.items():
        if entry.dtype not in types:
            raise ValueError(f"{name[:100]!a} is of type {entry.dtype[:20]!a}")
        dtype, shape, count = types[entry.dtype], entry.shape, math.prod(entry.shape)
        views[name] = (
            torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry.begin).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    return views


def in_16_bits(tensor: Tensor) -> Tensor:
    """The tensor; floats of 8 bits, which torch computes nearly nothing in, as fp16, which has all of their values."""
    return tensor.half() if tensor.itemsize == 1 and tensor.is_floating_point() else tensor


@contextmanager
def errors(kind: str, name: str, what: str, path: Path) -> Iterator[None]:
    """Context that turns all errors of reading a file into `ModelError`, naming it. `what` it was to be ends some."""
    try:
        yield
    except ModelError as error:
        text = error.detail.replace(str(path), path.name)
        raise ModelError(text if error.kind else f"{name}: {text}", kind=kind) from error
    except OSError as error:
        raise ModelError(f"{name}: cannot be read ({error.strerror or error})", kind=kind) from error
    except Exception as error:  # of several libraries, which expect other keys or shapes
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{name}: is no {what} that is known, or damaged ({why})", kind=kind) from error
