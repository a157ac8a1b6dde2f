"""Converts a UNet to OpenVINO, quantizes it with NNCF, and runs it under every useful performance setting.

OpenVINO and NNCF are imported on first use, and by no other file.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.denoise import DenoiserInputs
from pipeline.families.sdxl import FAMILY

Arrays = list[npt.NDArray[np.float32]]
CONDITIONING = ("kv", "pooled", "time_ids")  # in the order of the arguments


class _Positional(nn.Module):
    """A UNet with only positional tensor arguments, in the order of `_arguments`."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample: Tensor, timestep: Tensor, hidden: Tensor, pooled: Tensor, time_ids: Tensor) -> Tensor:
        given = dict(zip(CONDITIONING, (hidden, pooled, time_ids), strict=True))
        return FAMILY.call(self.unet, DenoiserInputs(sample, timestep, given))[0]


def convert(unet: Any, example: DenoiserInputs) -> Any:
    """The UNet as an `openvino.Model` in fp32, for any number of rows of the example's shapes.

    Raises ImportError without OpenVINO.
    """
    openvino = _openvino()
    tensors = tuple(_arguments(example))
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # of tracing, about shapes that are static here
        return openvino.convert_model(
            _Positional(unet).eval(), example_input=tensors, input=[[-1, *tensor.shape[1:]] for tensor in tensors]
        )


def quantize(model: Any, calibration: Sequence[DenoiserInputs]) -> Any:
    """The model in INT8 by NNCF's post-training quantization, calibrated on these forwards; `model` stays as it is.

    NNCF's own settings for transformers, SmoothQuant among them, with symmetric activations, which run a little faster.
    Raises ImportError without NNCF.
    """
    _openvino()
    import nncf

    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
        return nncf.quantize(
            model.clone(),
            nncf.Dataset(list(calibration), _arrays),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.PERFORMANCE,
            subset_size=len(calibration),
        )


def settings(
    model: Any, inputs: DenoiserInputs, precisions: Sequence[str], threads: int
) -> dict[str, Callable[[], Tensor]]:
    """The forward of `inputs` under each performance hint and precision ("f32", "bf16"), by what was set.

    LATENCY runs all rows together on all threads. THROUGHPUT runs as many requests at once as OpenVINO finds best, each
    with its share of the rows.
    """
    core = _openvino().Core()
    made = {}
    for precision in precisions:
        given = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        latency, throughput = ({"PERFORMANCE_HINT": hint, **given} for hint in ("LATENCY", "THROUGHPUT"))
        made[f"latency, {precision}"] = _forward(core, model, inputs, 1, latency)
        requests = _requests(core, model, inputs, throughput)
        if requests > 1:
            made[f"throughput of {requests}, {precision}"] = _forward(core, model, inputs, requests, throughput)
    return made


def _requests(core: Any, model: Any, inputs: DenoiserInputs, given: dict[str, Any]) -> int:
    """The number of concurrent requests that OpenVINO recommends, reduced to a divisor of the rows."""
    rows = inputs.sample.shape[0]
    advised = _compile(core, model, inputs, given).get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
    return max(count for count in range(1, min(int(advised), rows) + 1) if rows % count == 0)


def _forward(
    core: Any, model: Any, inputs: DenoiserInputs, requests: int, given: dict[str, Any]
) -> Callable[[], Tensor]:
    parts = [_arrays(inputs, index, requests) for index in range(requests)]
    compiled = _compile(core, model, inputs, given, requests)
    infer = [compiled.create_infer_request() for _ in parts]

    def one() -> Tensor:
        return torch.from_numpy(infer[0].infer(parts[0], share_inputs=True, share_outputs=True)[0])

    def several() -> Tensor:
        for request, part in zip(infer, parts, strict=True):
            request.start_async(part, share_inputs=True)
        for request in infer:
            request.wait()
        return torch.cat([torch.from_numpy(request.get_output_tensor(0).data) for request in infer])

    return one if requests == 1 else several


def _compile(core: Any, model: Any, inputs: DenoiserInputs, given: dict[str, Any], requests: int = 1) -> Any:
    shaped = model.clone()
    shaped.reshape({i: list(array.shape) for i, array in enumerate(_arrays(inputs, 0, requests))})
    return core.compile_model(shaped, "CPU", given)


def _arguments(inputs: DenoiserInputs) -> list[Tensor]:
    return [inputs.sample, inputs.timestep.float(), *(inputs.conditioning[name] for name in CONDITIONING)]


def _arrays(inputs: DenoiserInputs, index: int = 0, parts: int = 1) -> Arrays:
    """One of that many equal parts of the rows."""
    rows = inputs.sample.shape[0] // parts
    return [tensor[index * rows : (index + 1) * rows].numpy() for tensor in _arguments(inputs)]


def _openvino() -> Any:
    # Both packages report what they were used for to a server, without asking. A benchmark tells nobody; without this
    # module they stay silent.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino
