"""Chooses a text model's precision where none is configured."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from contract.precision import PRECISIONS, SCHEMES, is_calibrated, is_quantized

if TYPE_CHECKING:
    from llm.checkpoints.load import TextModel
    from llm.parallel.shards import Rank

_BF16 = (8, 0)  # minimum compute capability for multiplying it


def choose(variants: Collection[str], *, capability: tuple[int, int] | None, lacks: str | None) -> tuple[str, str]:
    """The precision, and the reason in a few words.

    Args:
        variants: the schemes that the model has a variant of.
        capability: the GPU's compute capability; None for a CPU.
        lacks: why our kernels do not run on the device; None if they do.
    """
    # Others must be asked for.
    variants = [scheme for scheme in SCHEMES if scheme in variants and is_calibrated(scheme)]
    runs = [scheme for scheme in variants if _runs(scheme, capability)]
    if runs and lacks is None:
        return runs[0], f"the model has such a variant (model-{runs[0]}), and our kernels run"
    if runs:
        reason = f"{lacks}, so its model-{runs[0]} is of no use"
    elif variants:
        reason = f"this device does not multiply {' or '.join(sorted(variants))}"
    else:
        reason = "the model has no variant in 8 bits, which `diptych quantize --text-model` makes"
    if capability is None:
        return "fp32", reason
    if capability < _BF16:
        return "fp32", f"{reason}, and compute capability {capability[0]}.{capability[1]} has no bf16"
    return "bf16", reason


def _runs(scheme: str, capability: tuple[int, int] | None) -> bool:
    """Whether our kernels ever run it on such a GPU, or on a CPU."""
    precision = PRECISIONS[scheme]
    if capability is None:
        return precision.cpu_kernels
    return precision.gpu_kernels is not None and capability >= precision.gpu_kernels


def load(
    name: str, requested: str, *, device: str, lacks: str | None, rank: Rank | None = None
) -> tuple[TextModel, str]:  # fmt: skip
    """Load a model in the configured precision, or for "auto" in that of `choose`; and the reason.

    `lacks` as for `choose`, `rank` as for `llm.checkpoints.load.load`. Raises `llm.checkpoints.load.TextModelError`.
    """
    import torch

    from llm.checkpoints.load import TextModelError, load, published, variants
    from llm.families import family

    if requested != "auto":
        return load(name, precision=requested, device=device, rank=rank), "as the settings say"
    capability = torch.cuda.get_device_capability(device) if device.startswith("cuda") else None
    if (form := published(name)) is not None:
        if capability is not None and not _runs(form.precision, capability):
            has = f"compute capability {capability[0]}.{capability[1]}"
            raise TextModelError(f"{name}: is published in 4 bits ({form.method}), which {has} does not multiply")
        return load(
            name, precision=form.precision, device=device, rank=rank
        ), f"it is published in 4 bits, by {form.method}"
    selected, reason = choose(variants(name), capability=capability, lacks=lacks)
    model = load(name, precision=selected, device=device, rank=rank)
    if is_quantized(selected):
        try:
            family.check(model.network)
        except ValueError as error:
            selected, _ = choose((), capability=capability, lacks=None)
            model = load(name, precision=selected, device=device, rank=rank)
            reason = f"its layers stay unquantized: {error}"
    return model, reason
