"""Looks for NaN and infinity at the end of each network of a request.

On a GPU the host does not wait for the answers: they stay on the device until the picture is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from contract.errors import Invalid
from core.failures import NotFinite

if TYPE_CHECKING:
    from pipeline.families.family import ImageModel

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class NetworkEnd(NamedTuple):
    """The end of a network: its name with its precision, and bool [] on its device, whether all that it gave is finite.

    `field` is the request's, if the request brought the network along.
    """

    network: str
    finite: Tensor
    field: str = ""

    @property
    def error(self) -> Exception:
        """Return the error of a request for which `finite` is false."""
        error = NotFinite(self.network)
        return Invalid(self.field, f"with it {error}") if self.field else error


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return bool []: whether all values of all tensors on one device are finite; integers are."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return torch.ones((), dtype=torch.bool)
    norms = torch._foreach_norm(floats, torch.inf)  # a launch or two for all of them; of NaN it is NaN
    finite: Tensor = torch.stack([norm.float() for norm in norms]).isfinite().all()
    return finite


def finite_rows(x: Tensor) -> Tensor:
    """Return bool [B]: which rows of x [B, …] are finite."""
    finite: Tensor = torch.linalg.vector_norm(x.flatten(1), torch.inf, dim=1).isfinite()
    return finite


def first_errors(requests: Sequence[Sequence[NetworkEnd]]) -> list[Exception | None]:
    """Return the error of the first network of each request that gave what is not finite, or None. Reads all flags at
    once, which waits for the device.
    """
    flags = [end.finite for ends in requests for end in ends]
    if not flags:
        return [None] * len(requests)
    device = next((flag.device for flag in flags if flag.device.type != "cpu"), flags[0].device)
    values = iter(torch.stack([flag.to(device) for flag in flags]).tolist())
    failed = [[end for end in ends if not next(values)] for ends in requests]
    return [ends[0].error if ends else None for ends in failed]


def network_name(label: str, model: ImageModel, dtype: torch.dtype | None = None) -> str:
    """Return the name of a model's network in errors. `dtype` is what it computes in, where that may not be the model's
    own.
    """
    precision = model.precision if dtype in (None, model.dtype) else dtype_name(dtype)
    return f"the {precision} {label} of {model.name}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the precision that is this type."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def denoiser_label(model: ImageModel) -> str:
    """Return what the model's denoiser is called: UNet or transformer."""
    return "UNet" if model.family.denoiser == "unet" else model.family.denoiser
