"""Compiles CUDA C++ with NVRTC, caches the result on disk, launches it, and creates TMA tensor maps.

Calls libcuda and libnvrtc, which come with the driver and with torch: no compiler has to be installed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from core.kernels.device import hopper_lacks

_DATA_TYPES = {
    torch.int8: 0,  # TMA moves bytes; unsigned works for signed
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,
    torch.bfloat16: 9,
    torch.float16: 6,
}
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SWIZZLES = {0: 0, 64: 2, 128: 3}  # by bytes of a row
_PROMOTE_256B = 3
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

log = logging.getLogger(__name__)

_kept_in = Path("~/.cache/diptych/kernels")


class DriverError(RuntimeError):
    """The CUDA driver or NVRTC returned an error. The message names the call, and why."""


class TensorMap(ctypes.Structure):
    """128 opaque bytes that describe an array to TMA; passed to a kernel by value."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)

    @classmethod
    def aligned(cls) -> TensorMap:
        """A new one at an address divisible by 64, as the driver requires."""
        memory = (ctypes.c_uint64 * 24)()
        return cls.from_buffer(memory, -ctypes.addressof(memory) % 64)


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "12").split(".")[0]
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    for folder in folders:
        # NVRTC opens its built-in headers by bare name, which works only if they are loaded already.
        for path in sorted(folder.glob(f"*/lib/libnvrtc-builtins.so.{major}*")):
            with suppress(OSError):
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        names += [str(path) for path in sorted(folder.glob(f"*/lib/libnvrtc.so.{major}*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError(f"libnvrtc.so.{major} was not found; it comes with torch's CUDA packages")


def keep_in(folder: Path) -> None:
    """Cache compiled programs in this folder from now on; the default is `~/.cache/diptych/kernels`."""
    global _kept_in
    _kept_in = folder


@functools.cache
def unsupported_reason(device: torch.device) -> str | None:
    """Return why programs for Hopper cannot be built and run on this device, or None if they can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return hopper_lacks(None)
    return hopper_lacks(torch.cuda.get_device_capability(device), nvrtc_unsupported_reason())


@functools.cache
def compiler_unsupported_reason() -> str | None:
    """Return why programs cannot be compiled in this process, or None if they can. That needs no driver."""
    try:
        _nvrtc()
    except (DriverError, OSError) as error:
        return str(error)
    return None


@functools.cache
def nvrtc_unsupported_reason() -> str | None:
    """Return why programs cannot be compiled and loaded in this process, or None if they can."""
    try:
        _cuda()
    except OSError as error:
        return compiler_unsupported_reason() or str(error)
    return compiler_unsupported_reason()


def nvrtc_version() -> str:
    """Raises `DriverError` if there is no NVRTC."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def driver_version() -> str:
    """The driver's CUDA version. Raises OSError if there is no driver."""
    number = ctypes.c_int()
    _check(_cuda().cuDriverGetVersion(ctypes.byref(number)), "cuDriverGetVersion")
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _check(code: int, operation: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{operation}: {text.value.decode() if text.value else code}")


def _enter() -> None:
    """Make torch's context current in this thread: the driver API does not do so itself."""
    current = ctypes.c_void_p()
    _check(_cuda().cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
    if not current:
        _check(
            _cuda().cuDevicePrimaryCtxRetain(ctypes.byref(current), torch.cuda.current_device()),
            "cuDevicePrimaryCtxRetain",
        )
        _check(_cuda().cuCtxSetCurrent(current), "cuCtxSetCurrent")


def compile_program(text: str) -> bytes:
    """A cubin for sm_90a. Raises `DriverError` with the compiler's log."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    if code := nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None):
        raise DriverError(f"nvrtcCreateProgram: {code}")
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if code:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise DriverError(f"nvrtcCompileProgram: {log.value.decode(errors='replace')}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def compiled(text: str) -> bytes:
    """The cubin of a program, from disk if the same NVRTC compiled it before."""
    digest = hashlib.sha256(f"{nvrtc_version()}\n{text}".encode()).hexdigest()[:32]
    folder = _kept_in.expanduser()
    path = folder / f"{digest}.cubin"
    if path.is_file():
        return path.read_bytes()
    binary = compile_program(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        Path(name).replace(path)
    except OSError as error:
        _not_kept(folder, error.strerror or str(error))
    return binary


@functools.cache
def _not_kept(folder: Path, reason: str) -> None:
    """Logged once: the reason is the same for all programs."""
    log.warning("GPU kernels are compiled at every start: %s cannot be written (%s)", folder, reason)


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, its value as words."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class Kernel:
    """One compiled kernel, loaded into torch's CUDA context."""

    def __init__(self, text: str, entry: str, *, threads: int, shared_bytes: int) -> None:
        torch.cuda.init()
        _enter()
        self._threads, self._shared = threads, shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_cuda().cuModuleLoadData(ctypes.byref(self._module), compiled(text)), "cuModuleLoadData")
        code = _cuda().cuModuleGetFunction(ctypes.byref(self._function), self._module, entry.encode())
        _check(code, "cuModuleGetFunction")
        code = _cuda().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        _check(code, "cuFuncSetAttribute")

    def launch(self, blocks: int, *arguments: Any, early: bool = False) -> None:
        """Launch `blocks` blocks on torch's current stream. Arguments: ctypes structures, passed by value. `early`: by
        programmatic dependent launch.
        """
        _enter()
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))
        launch = _LaunchConfig(
            (blocks, 1, 1), (self._threads, 1, 1), self._shared, torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute), int(early),
        )  # fmt: skip
        _check(_cuda().cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None), "cuLaunchKernelEx")


def tensor_map(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int] = (),
    *,
    swizzle: int = 128,
) -> TensorMap:
    """Describe `tensor`'s memory to TMA, with a swizzle over so many bytes; out-of-bounds elements read as zero.

    `sizes`, `box` and `steps` (element strides, default 1) run from the innermost dimension outwards; `strides`, in
    bytes and multiples of 16, leave out the innermost. Raises `DriverError` if the driver rejects them.
    """
    rank = len(sizes)
    result = TensorMap.aligned()
    code = _cuda().cuTensorMapEncodeTiled(
        ctypes.byref(result),
        _DATA_TYPES[tensor.dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(tensor.data_ptr()),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(steps or [1] * rank)),
        0,
        _SWIZZLES[swizzle],
        _PROMOTE_256B,
        0,
    )
    _check(code, f"cuTensorMapEncodeTiled(sizes={list(sizes)}, strides={list(strides)}, box={list(box)})")
    return result


@functools.cache
def multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
