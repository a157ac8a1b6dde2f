"""Which kernels run where, and why: over a table of devices, none of which has to be there."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.kernels.device import (
    AVX2,
    AVX512,
    HOPPER,
    TORCH,
    TRITON,
    DeviceInfo,
    KernelChoice,
    decisions,
    hopper_lacks,
    instead,
    lacks,
    say,
    summary,
)
from tests.core.quant.stage import Many

V100 = DeviceInfo("cuda", "Tesla V100", (7, 0), triton="3.7.1")
A100 = DeviceInfo("cuda", "NVIDIA A100", (8, 0), triton="3.7.1")
L4 = DeviceInfo("cuda", "NVIDIA L4", (8, 9), triton="3.7.1")
H200 = DeviceInfo("cuda", "NVIDIA H200", (9, 0), triton="3.7.1")
B200 = DeviceInfo("cuda", "NVIDIA B200", (10, 0), triton="3.7.1")
NO_TRITON = replace(H200, triton=None)
NO_NVRTC = replace(H200, nvrtc_lacks="libnvrtc.so.13 was not found; it comes with torch's CUDA packages")
ABSENT = DeviceInfo("cuda", "cuda:9", triton="3.7.1")
ZEN5 = DeviceInfo("cpu", "AMD EPYC", instructions=AVX512)
HASWELL = DeviceInfo("cpu", "Haswell", instructions=AVX2, cpu_lacks="the processor has no AVX-512 VNNI")
ARM = DeviceInfo("cpu", "aarch64", cpu_lacks="INT8 kernels are for x86 processors under Linux, not aarch64, linux")

PRECISIONS = ("int8", "fp8", "bf16", "fp16", "fp32")
RUNS = {  # the kernels that draw, by precision; what is not there is torch's, or refused
    "V100": (V100, {}),
    "A100": (A100, {"int8": TRITON, "bf16": TRITON}),
    "L4": (L4, {"int8": TRITON, "fp8": TRITON, "bf16": TRITON}),
    "H200": (H200, {"int8": HOPPER, "fp8": HOPPER, "bf16": HOPPER}),
    "B200": (B200, {"int8": TRITON, "fp8": TRITON, "bf16": TRITON}),
    "H200 without Triton": (NO_TRITON, {}),
    "H200 without NVRTC": (NO_NVRTC, {"int8": TRITON, "fp8": TRITON, "bf16": TRITON}),
    "no such GPU": (ABSENT, {}),
    "AVX-512": (ZEN5, {"int8": AVX512, "fp32": AVX512}),
    "AVX2": (HASWELL, {"int8": AVX2, "fp32": AVX2}),
    "ARM": (ARM, {}),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RUNS)
def test_which_kernels_draw(name: str, precision: str) -> None:
    device, runs = RUNS[name]
    wanted = runs.get(precision, TORCH)
    found = decisions(device, precision)
    implementation, reason = summary(found)
    assert implementation == wanted
    assert (lacks(device, precision) is None) == (precision in runs)
    assert bool(reason) == (wanted not in (HOPPER, AVX512)), "a reason stands wherever something faster exists"


@pytest.mark.parametrize(
    ("device", "precision", "said"),
    [
        (V100, "int8", "int8 needs compute capability 8.0, Tesla V100 has 7.0"),
        (A100, "fp8", "fp8 needs compute capability 8.9, NVIDIA A100 has 8.0"),
        (NO_TRITON, "int8", "Triton is not installed"),
        (ABSENT, "int8", "no CUDA device"),
        (H200, "fp16", "the GPU kernels support bf16, int8, fp8, int8-sparse, w4a16, w4a8, nvfp4, not fp16"),
        (ZEN5, "bf16", "the CPU kernels support fp32, int8, int8-dynamic, int8-sparse and w4a8, not bf16"),
        (ARM, "int8", ARM.cpu_lacks),
    ],
)
def test_what_a_device_lacks(device: DeviceInfo, precision: str, said: str) -> None:
    assert lacks(device, precision) == said


@pytest.mark.parametrize(
    ("device", "precision", "said"),
    [
        (A100, "fp8", "int8 or bf16"),
        (V100, "fp8", "fp16"),
        (V100, "int8", "fp16"),
        (NO_TRITON, "int8", "bf16"),
        (ZEN5, "fp8", "int8 or fp32"),
        (ARM, "int8", "fp32"),
    ],
)
def test_what_to_take_instead(device: DeviceInfo, precision: str, said: str) -> None:
    assert instead(device, precision) == said


def test_each_operation_on_hopper_and_before_it() -> None:
    assert [str(one) for one in decisions(H200, "int8")] == [
        "linear: Hopper kernels", "geglu: Hopper kernels", "conv: Hopper kernels", "upsample conv: Hopper kernels",
        "layer norm: Hopper kernels", "attention: Hopper kernels", "group norm: Triton kernels",
        "quantize: Triton kernels",
    ]  # fmt: skip
    older = "not a Hopper device (compute capability 8.0)"
    assert [str(one) for one in decisions(A100, "int8")] == [
        f"linear: Triton kernels: {older}", f"geglu: Triton kernels: {older}", f"conv: Triton kernels: {older}",
        f"upsample conv: Triton kernels: {older}", f"layer norm: Triton kernels: {older}", f"attention: torch: {older}",
        "group norm: Triton kernels", "quantize: Triton kernels",
    ]  # fmt: skip
    assert str(decisions(NO_NVRTC, "fp8")[0]) == f"linear: Triton kernels: {NO_NVRTC.nvrtc_lacks}"
    assert [str(one) for one in decisions(NO_TRITON, "bf16")] == ["all layers: torch: Triton is not installed"]
    assert [str(one) for one in decisions(ZEN5, "int8")] == ["all layers: AVX-512 VNNI kernels"]
    assert str(decisions(HASWELL, "fp32")[0]) == "all layers: AVX2 kernels: the processor has no AVX-512 VNNI"
    assert {one.operation: one.implementation for one in decisions(H200, "bf16")} == {
        "linear": TORCH, "conv": TORCH, "layer norm": TORCH, "attention": HOPPER, "group norm": TRITON,
    }  # fmt: skip


@given(...)
def test_a_newer_gpu_lacks_nothing_that_an_older_one_has(
    major: Many, minor: Annotated[int, st.integers(0, 9)], precision: Annotated[str, st.sampled_from(PRECISIONS)]
) -> None:
    def runs(capability: tuple[int, int]) -> bool:
        return lacks(replace(A100, capability=capability), precision) is None

    assert not runs((major, minor)) or (runs((major, minor + 1)) and runs((major + 1, 0)))
    assert (hopper_lacks((major, minor)) is None) == ((major, minor) == (9, 0))


def test_a_decision_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    say.cache_clear()
    once = KernelChoice("linear", TRITON, "the output is fp32")
    with caplog.at_level(logging.INFO):
        say(once)
        say(KernelChoice("linear", TRITON, "the output is fp32"))
        say(replace(once, reason="an address is not a multiple of 16"))
        say(KernelChoice("all layers", TORCH, "Triton is not installed"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "linear: Triton kernels: the output is fp32"),
        ("INFO", "linear: Triton kernels: an address is not a multiple of 16"),
        ("WARNING", "all layers: torch: Triton is not installed"),
    ]
