"""Collects input ranges of layers with hooks while a model runs, reduces them, and stores them in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from core.quant.samples import Samples

Method = Literal["max", "percentile", "min-mean"]
See = Callable[[Sequence[str], Tensor], None]
"""Takes the names of layers and the input [..., K] that all of them read."""
_PERCENTILE = 0.999
_SAMPLE = 1024  # rows that the percentile is computed of: enough for its tail, and cheap


class StatisticsError(ValueError):
    """Unusable statistics. The message says why."""


@dataclass
class Statistics:
    """Largest magnitudes of each input channel, by layer and step: [steps, K].

    `largest` is over all batches, `smallest` the least of the batches' largest, `typical` the mean over batches of a
    high percentile. `model` is the digest of the observed weights, `data` of the inputs, where known. `samples`, where
    given, gets rows of the inputs.
    """

    model: str
    largest: dict[str, Tensor] = field(default_factory=dict)
    smallest: dict[str, Tensor] = field(default_factory=dict)
    typical: dict[str, Tensor] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)  # for each step
    data: str = ""
    samples: Samples | None = None

    def ranges(self, layer: str, method: Method = "max") -> Tensor:
        """The range of each input channel [K]. Raises `StatisticsError` for an unobserved layer, NaN or infinity.

        max: the largest ever. percentile: the largest step's mean over batches of the 99.9th percentile. min-mean: the
        mean over steps of the least of the batches' largest, which drops outliers of single prompts.
        """
        if layer not in self.largest:
            raise StatisticsError(f"{layer}: was not seen in calibration")
        if not torch.isfinite(self.largest[layer]).all():
            raise StatisticsError(f"{layer}: its range is not finite: the model made NaN or infinity in calibration")
        if method == "max":
            return self.largest[layer].amax(0)
        if method == "percentile":
            return self.typical[layer].amax(0)
        smallest = self.smallest[layer]
        return smallest[torch.isfinite(smallest).all(1)].mean(0)  # without the steps that did not run this layer

    def rows(self, layers: Sequence[str]) -> Tensor | None:
        """The rows [n, K] that were kept of the one input of these layers; None: there are none."""
        sampled = {} if self.samples is None else self.samples.rows
        return next((sampled[name] for name in layers if name in sampled and len(sampled[name])), None)

    @contextmanager
    def observe(self, model: nn.Module, layers: Iterable[str], step: int) -> Iterator[None]:
        """Context: observe the inputs of these layers, as one batch of this step.

        Nothing is added if the model raises. Raises `StatisticsError` for a layer that the model does not have.
        """
        hooks = []

        def watch(name: str, of_maps: bool) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, Any]], None]:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
                x = (inputs[0] if inputs else options["input"]).detach()
                see([name], x.movedim(1, -1) if of_maps else x)

            return hook

        with self.batch(step) as see:
            try:
                for name in layers:
                    try:
                        module = model.get_submodule(name)
                    except AttributeError:
                        raise StatisticsError(f"{name}: the model has no such layer") from None
                    of_maps = isinstance(module, nn.Conv2d)
                    hooks.append(module.register_forward_pre_hook(watch(name, of_maps), with_kwargs=True))
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    @contextmanager
    def batch(self, step: int) -> Iterator[See]:
        """Yield a function that records layers' inputs, all of them one batch of this step.

        Nothing is added if the body raises.
        """
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        sampled: dict[str, list[tuple[Tensor, Tensor]]] = {}
        number = self.batches[step] if step < len(self.batches) else 0

        def see(layers: Sequence[str], x: Tensor) -> None:
            extremes = _extremes(x)
            for name in layers:
                if self.samples is not None and name in self.samples.layers:
                    calls = sampled.setdefault(name, [])
                    calls.append(self.samples.pick(name, x, (number, step, len(calls))))
                before = seen.get(name, extremes)  # a layer may be called more than once a batch
                seen[name] = torch.maximum(before[0], extremes[0]), torch.maximum(before[1], extremes[1])

        yield see
        self._add(seen, step)
        if self.samples is not None:
            for name, calls in sampled.items():
                for rows, keys in calls:
                    self.samples.add(name, rows, keys)

    def _add(self, seen: Mapping[str, tuple[Tensor, Tensor]], step: int) -> None:
        while len(self.batches) <= step:
            self.batches.append(0)
        count = self.batches[step]
        self.batches[step] += 1
        tensors = [part for pair in seen.values() for part in pair]
        # One copy from a GPU instead of two for each layer, each of which would synchronize.
        on_host = torch.cat(tensors).cpu().split([len(part) for part in tensors]) if tensors else ()
        for name, largest, high in zip(seen, on_host[::2], on_host[1::2], strict=True):
            for table, empty in ((self.largest, 0.0), (self.smallest, torch.inf), (self.typical, 0.0)):
                rows = table.get(name, largest.new_empty(0, largest.numel()))
                missing = len(self.batches) - len(rows)
                table[name] = torch.cat([rows, rows.new_full((missing, largest.numel()), empty)]) if missing else rows
            # NaN must stay: it is rejected later, by the layer's name.
            self.largest[name][step] = torch.maximum(self.largest[name][step], largest)
            self.smallest[name][step] = torch.minimum(self.smallest[name][step], largest)
            self.typical[name][step] += (high - self.typical[name][step]) / (count + 1)

    def save(self, path: Path) -> None:
        """Write everything into one safetensors file atomically. Raises `StatisticsError`."""
        tables = self._tables() + self._sampled()
        tensors = {f"{kind}/{name}": t.contiguous() for kind, table in tables for name, t in table.items()}
        metadata = {"model": self.model, "data": self.data, "batches": json.dumps(self.batches)}
        if self.samples is not None:
            metadata["sampled"] = json.dumps([self.samples.count, sorted(self.samples.layers)])
        partial = path.with_name(path.name + ".part")
        try:
            save_file(tensors, partial, metadata)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise StatisticsError(f"{path}: cannot be written ({error})") from error

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """Raises `StatisticsError` for a file of another format."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                if not {"model", "data", "batches"} <= metadata.keys():
                    raise ValueError("it does not say of which model")
                statistics = cls(metadata["model"], batches=json.loads(metadata["batches"]), data=metadata["data"])
                if "sampled" in metadata:
                    count, layers = json.loads(metadata["sampled"])
                    statistics.samples = Samples(layers, int(count))
                tables = dict(statistics._tables() + statistics._sampled())
                for key in list(file.keys()):
                    kind, _, name = key.partition("/")
                    tables[kind][name] = file.get_tensor(key)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise StatisticsError(f"{path}: holds no statistics ({error})") from error
        statistics._check(path)
        return statistics

    def _tables(self) -> list[tuple[str, dict[str, Tensor]]]:
        return [("largest", self.largest), ("smallest", self.smallest), ("typical", self.typical)]

    def _sampled(self) -> list[tuple[str, dict[str, Tensor]]]:
        return [] if self.samples is None else [("rows", self.samples.rows), ("keys", self.samples.keys)]

    def _sampled_fit(self) -> bool:
        return self.samples is None or self.samples.fit(self.largest)

    def _check(self, path: Path) -> None:
        """Reject tables that do not fit one another."""
        steps = self.batches
        sound = isinstance(steps, list) and all(isinstance(count, int) and count >= 0 for count in steps)
        for name in {name for _, table in self._tables() for name in table} if sound else ():
            tables = [table.get(name) for _, table in self._tables()]
            shapes = {None if tensor is None else (tensor.dtype, *tensor.shape) for tensor in tables}
            channels = 0 if tables[0] is None else tables[0].shape[-1:].numel()
            sound = sound and shapes == {(torch.float32, len(steps), channels)}
        if not (sound and self._sampled_fit()):
            raise StatisticsError(f"{path}: holds no statistics (its tables do not fit one another)")


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitude and percentile of each channel of x [..., K], both fp32 [K] on x's device.

    The percentile is linear between ranks (Hyndman and Fan, 1996, type 7), over at most 1,024 rows at equal distances.
    """
    rows = math.prod(x.shape[:-1])
    axes = tuple(range(x.dim() - 1))
    largest = torch.maximum(x.amax(axes), -x.amin(axes))  # a third of the time of abs(), which writes a copy
    every = -(-rows // _SAMPLE)
    sample = x.reshape(rows, x.shape[-1])[::every] if x.is_contiguous() else _rows(x, every)
    at = _PERCENTILE * (len(sample) - 1)
    low = math.floor(at)
    top = sample.abs().float().topk(len(sample) - low, dim=0).values  # the first is the largest
    high = torch.lerp(top[-1], top[-2], at - low) if len(top) > 1 else top[-1]
    return largest.float(), high


def _rows(x: Tensor, every: int) -> Tensor:
    """Each `every`-th of the rows [K] of x [..., K], which is not contiguous, without a copy of the whole."""
    numbers = torch.arange(0, math.prod(x.shape[:-1]), every, device=x.device)
    return x[torch.unravel_index(numbers, x.shape[:-1])]
