"""Image prompts of requests: IP-Adapters of one folder, and the keys and values that they make of a picture, once."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from contract.errors import Invalid
from contract.image_prompt import FIELD, ImagePrompt
from pipeline.checkpoints.checkpoint import read_headers
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions import ip_adapter_file
from pipeline.extensions.sized_cache import SizedCache, stamp_of
from pipeline.extensions.vision import VisionEncoder

if TYPE_CHECKING:
    from pipeline.families.family import ImageModel
    from unet_opt.ip_adapter import IPAdapter

_SEEN = 64  # pictures whose tokens are kept


class _Loaded(NamedTuple):
    """An adapter with its encoder. `digest` identifies the files of both."""

    adapter: IPAdapter
    encoder: VisionEncoder
    digest: str


class RequestImagePrompt(NamedTuple):
    """What is made of a request's image prompt: keys and values [R, T, width] by the request's rows, which `acts` says
    in which steps they are read.
    """

    name: str
    digest: str  # of the adapter's and the encoder's files
    keys: Mapping[int, Tensor]
    acts: tuple[bool, ...]


class ImagePromptFolder:
    """The IP-Adapters of one folder for one model. Thread-safe.

    An adapter and its encoder are read in the background: when a request is checked, before it reaches the engine, and,
    if they were evicted meanwhile, before it joins others.
    """

    def __init__(self, folder: Path, model: ImageModel, dtype: torch.dtype, capacity_bytes: int) -> None:
        """`dtype` is that of keys and values. `capacity_bytes` limits the adapters and encoders that are kept."""
        self.folder = folder.expanduser()
        self._model, self._dtype = model, dtype
        self.cache = SizedCache(capacity_bytes)
        self._tokens: dict[str, int] = {}  # of adapters that were read
        self._latest: dict[str, tuple[ref[IPAdapter], ref[VisionEncoder], str]] = {}  # by name; the cache keeps them
        self._again: dict[str, Future[_Loaded]] = {}  # evicted ones that are read again, until a request takes them
        self._seen: OrderedDict[tuple[str, str], Tensor] = OrderedDict()

    @property
    def held(self) -> list[str]:
        """The names of adapters that are in memory with their encoders."""
        return [name for name in tuple(self._latest) if self._in_memory(name) is not None]

    def names(self) -> list[str]:
        """The names that requests may use now."""
        return ip_adapter_file.offered(self.folder)

    def check(self, prompts: Sequence[ImagePrompt]) -> None:
        """Check that the adapters exist and fit, and read them. Raises `Invalid`."""
        for name in dict.fromkeys(prompt.model for prompt in prompts):
            found = self._find(name)
            needed = found.adapter.size_bytes + found.encoder.size_bytes
            if needed > self.cache.capacity:
                raise Invalid(
                    f"{FIELD}.model",
                    f"{name}: it needs {needed} bytes with its encoder, and there is room for "
                    f"{self.cache.capacity} (DIPTYCH_IP_ADAPTER_MIB)",
                )

    def take(self, prompts: Sequence[ImagePrompt], *, wait: bool = False) -> list[_Loaded] | None:
        """What a checked request is to keep until its prompts are encoded. On the engine's thread; reads no file.

        With `wait` None means not yet: an adapter that was evicted is read again; without, `prepare` reads it.
        """
        names = dict.fromkeys(prompt.model for prompt in prompts)
        self._again = {name: again for name, again in self._again.items() if name in names or not again.done()}
        kept = {name: loaded for name in names if (loaded := self._in_memory(name)) is not None}
        read = [self._is_read_again(name) for name in names if wait and name not in kept]
        if not all(read):
            return None
        again = [self._again.pop(name) for name in names if name in self._again]
        # Errors are told by `prepare`.
        return [*kept.values(), *(one.result() for one in again if one.done() and one.exception() is None)]

    def _is_read_again(self, name: str) -> bool:
        """Whether an evicted adapter is; begins with it, unless that is under way."""
        if name not in self._again:
            again = Future[_Loaded]()
            threading.Thread(target=self._read_again, args=(name, again), daemon=True).start()
            self._again[name] = again
        return self._again[name].done()

    def _read_again(self, name: str, again: Future[_Loaded]) -> None:
        try:
            again.set_result(self._find(name))
        except BaseException as error:
            again.set_exception(error)

    def tokens(self, prompts: Sequence[ImagePrompt]) -> tuple[int, ...]:
        """Of checked prompts, the tokens of each."""
        return tuple(self._tokens[prompt.model] for prompt in prompts)

    def request_bytes(self, prompts: Sequence[ImagePrompt], rows: int, width: int) -> int:
        """That the keys and values of checked prompts take, of so many channels (`Network.text_width`)."""
        return rows * sum(self.tokens(prompts)) * width * self._dtype.itemsize

    @torch.inference_mode()
    def prepare(
        self, prompts: Sequence[ImagePrompt], rows: int, acts_of: Callable[[ImagePrompt], tuple[bool, ...]]
    ) -> tuple[RequestImagePrompt, ...]:
        """The keys and values of each prompt: of two rows the first reads a picture of nothing, as in diffusers.

        `acts_of` says in which steps each one acts. On the thread that computes. Raises `Invalid`.
        """
        made = []
        for prompt in prompts:
            loaded = self._checked(prompt.model)
            tokens = self._tokens_of(loaded, prompt)[-rows:]
            own = loaded.adapter.keys(tokens, prompt.strength).to(self._dtype)
            made.append(RequestImagePrompt(prompt.model, loaded.digest, {1: own[-1:], rows: own}, acts_of(prompt)))
        return tuple(made)

    def size_bytes(self) -> int:
        """That the adapters of the folder, and the encoders that they may read with, take at most, by their files."""
        return min(self.cache.capacity, ip_adapter_file.size_bytes(self.folder))

    def _tokens_of(self, loaded: _Loaded, prompt: ImagePrompt) -> Tensor:
        """[2, T, D]: of a picture of nothing, and of the prompt's, each computed alone; kept for the last pictures."""
        key = (loaded.digest, prompt.digest)
        if key not in self._seen:
            adapter, encoder = loaded.adapter, loaded.encoder
            fitted = encoder.fit(prompt.pixels, (prompt.width, prompt.height))
            seen = encoder.embed(fitted, fine=adapter.fine)
            # Without a picture Plus reads a grey one; the other kind an embedding of zeros.
            nothing = encoder.embed(torch.zeros_like(fitted), fine=True) if adapter.fine else torch.zeros_like(seen)
            self._seen[key] = torch.cat([adapter.project(nothing), adapter.project(seen)])
        self._seen.move_to_end(key)
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        return self._seen[key]

    def _checked(self, name: str) -> _Loaded:
        """The adapter as the last check of a request found it, without a look at files while it is in memory."""
        return self._in_memory(name) or self._find(name)

    def _in_memory(self, name: str) -> _Loaded | None:
        adapter, encoder, digest = self._latest[name]
        own = adapter(), encoder()
        return None if own[0] is None or own[1] is None else _Loaded(own[0], own[1], digest)

    def _find(self, name: str) -> _Loaded:
        """The adapter's current content, with its encoder. Raises `Invalid`."""
        try:
            file = ip_adapter_file.find(self.folder, name)
            adapter, digest = self.cache.find(
                ("adapter", file), stamp_of(file), lambda: ip_adapter_file.read(name, file, self._model, self._device),
                lambda found: found.adapter.size_bytes,
                lambda: ip_adapter_file.check_header(name, file, self._model),
            )  # fmt: skip
            where = ip_adapter_file.find_encoder(self.folder, name, file, adapter)
            encoder = self.cache.find(
                ("encoder", where.resolve()), stamp_of(where), lambda: self._encoder(name, where),
                lambda found: found.size_bytes, lambda: read_headers(where),
            )  # fmt: skip
        except ModelError as error:
            raise Invalid(f"{FIELD}.model", str(error).removeprefix("IP-Adapter ")) from error
        except OSError as error:
            raise Invalid(f"{FIELD}.model", f"{name}: cannot be read ({error.strerror or error})") from error
        self._tokens[name] = adapter.tokens
        both = hashlib.sha256(f"{digest}:{encoder.digest}".encode()).hexdigest()[:16]
        self._latest[name] = ref(adapter), ref(encoder), both
        return _Loaded(adapter, encoder, both)

    def _encoder(self, name: str, where: Path) -> VisionEncoder:
        # On a CPU in fp32, like the adapter: it runs once for each picture.
        dtype = torch.float32 if self._device.type == "cpu" else self._model.dtype
        try:
            return VisionEncoder(where, self._device, dtype)
        except ModelError as error:
            raise ModelError(f"IP-Adapter {name}: {str(error).replace(str(where), where.name)}") from error

    @property
    def _device(self) -> torch.device:
        return self._model.device


def check_image_prompts(folder: ImagePromptFolder | None, model: ImageModel, prompts: Sequence[ImagePrompt]) -> None:
    """Raise `Invalid` for image prompts that this model does not offer; None: no folder is configured."""
    if not model.family.image_prompts:
        raise Invalid(FIELD, f"is not supported by {model.family.label}")
    if getattr(model.denoiser.up_blocks[-1], "attentions", None):  # which shallow steps compute without them
        raise Invalid(FIELD, "is not supported by a UNet with attention in its last block")
    if folder is None:
        raise Invalid(FIELD, "no folder of IP-Adapters is configured (DIPTYCH_IP_ADAPTER_DIR)")
    folder.check(prompts)
