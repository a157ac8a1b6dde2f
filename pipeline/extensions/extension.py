"""The protocol of what a request brings along: files of a folder, what is made of them, what that adds to its steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from contract.errors import Invalid
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.asset_folder import AssetFolder

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from contract.image import ImageParameters
    from contract.picture_input import PictureInput
    from core.config import Settings
    from pipeline.backends.backend import BatchGroup, ImageBackend
    from pipeline.extensions.adapters import ScaledAdapter
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState
    from pipeline.text.conditioning import Conditioner
    from pipeline.text.textual_inversion import TextualInversion
    from unet_opt.inputs import DenoiserInputs


F = TypeVar("F", bound=AssetFolder[Any])


class StepBatch(NamedTuple):
    """A step of requests that share a forward of so many `rows`, exactly `fixed` where bits depend on it."""

    group: BatchGroup
    states: Sequence[ImageState]
    inputs: DenoiserInputs
    rows: int
    fixed: int | None


class Finish(Protocol):
    """What remains of a decoded picture, one iteration at a time: `left` of them, of which `done` are over."""

    done: int

    @property
    def left(self) -> int: ...

    def compute(self) -> None:
        """Run the next iteration; to be repeated until `done` is raised."""
        ...

    def image(self) -> Image:
        """The whole picture, after the last one."""
        ...


class Extension(Generic[F]):
    """One kind of what requests bring along, under the `field` of their parameters.

    A request's part is a *lease*: whatever `acquire` returns, kept in `ImageState.extensions` until `release`. Every
    kind overrides the methods that it needs; those of this class stand for a kind without files, costs or steps.
    """

    field: ClassVar[str]
    card_field: ClassVar[str]  # of the model's card: the names that requests may use
    unconfigured: ClassVar[str] = ""  # why requests are refused without a folder
    printed_as: ClassVar[str] = ""  # the fingerprint's key of its files' digests; "": `field`
    waits: ClassVar[bool] = False  # whether `acquire` may have to wait
    steps: ClassVar[bool] = False  # whether it changes the denoiser's steps
    share: ClassVar[float] = 0.0  # of a step of the denoiser: what its rows cost until one was measured

    backend: ImageBackend | None = None  # takes the steps of its requests; None: the main one
    conditioner: Conditioner | None = None  # encodes their prompts

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: F | None = None) -> None:
        """`model` is `backend`'s before its parts were packed. Without a `folder` requests are refused."""
        self.model = model
        self.folder = folder

    # -- configuration ----------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        """The extension as the settings configure it."""
        return cls(model, backend, cls._folder_of(settings, model, backend))

    @classmethod
    def _folder_of(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> F | None:
        """The settings' folder; None if none is set, or the model takes none of its files."""
        return None

    @classmethod
    def kept_parts(cls, settings: Settings, model: ImageModel, *, packs: bool) -> set[str | None]:
        """The parts whose own weights torch reads for it, beside a backend that `packs` adapters or does not."""
        return set()

    @property
    def _files(self) -> F:
        assert self.folder is not None
        return self.folder

    def names(self) -> Sequence[str]:
        """The names that requests may use now."""
        return () if self.folder is None else self.folder.names()

    def held(self) -> Collection[str]:
        """The names of files that are in memory, if requests wait for files."""
        return () if self.folder is None or not self.waits else self.folder.held

    def reserved_bytes(self) -> int:
        """The memory that its files take at most, if requests wait for files."""
        return 0 if self.folder is None or not self.waits else self.folder.size_bytes()

    def costs(self, backend: ImageBackend, sizes: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """Its fields of the card's costs."""
        return {}

    # -- admission --------------------------------------------------------------------------------------------------

    def requested(self, request: ImageParameters) -> bool:
        return bool(getattr(request, self.field))

    def _refusal(self) -> str | None:
        """Why it is not offered; None if it is."""
        return self.unconfigured if self.folder is None else None

    def check(self, request: ImageParameters) -> Any:
        """What `acquire` needs of a request that asks for it. In the caller's thread; reads files. Raises `Invalid`."""
        if (why := self._refusal()) is not None:
            raise Invalid(self.field, why)
        return self._check_files(request)

    def _check_files(self, request: ImageParameters) -> Any:
        """The same where it is offered."""

    def size_bytes(self, request: ImageParameters, checked: Any, rows: int, chunks: int) -> int:
        """What a checked request holds beside its files, with so many chunks of text."""
        return 0

    def acquire(self, request: ImageParameters, checked: Any, *, wait: bool) -> Any:
        """A lease on the checked request's files; None: not yet. With `wait` evicted ones are awaited. Reads none."""
        return self._files.take(getattr(request, self.field), wait=wait)

    def release(self, lease: Any, *, keep: bool = False) -> None:
        """End a lease; `keep`: it is soon asked for again."""
        if self.folder is not None:
            self.folder.give(lease, keep=keep)

    def group(self, lease: Any) -> tuple[int, ...]:
        """What requests must have in common to share a forward in which bits depend on it."""
        return ()

    # -- prompts ----------------------------------------------------------------------------------------------------

    def named_in(self, texts: Mapping[str, str]) -> Sequence[TextualInversion]:
        """The files that words of these fields name. Raises `Invalid`."""
        return ()

    def prepare(self, request: ImageParameters, state: ImageState, hidden: torch.Tensor) -> None:
        """Make the inputs of the steps, for the prompts' embeddings [R, T, D], unless they are there already. On the
        lane; may be repeated. Raises `Invalid`.
        """

    # -- steps ------------------------------------------------------------------------------------------------------

    def rows_left(self, request: ImageParameters, state: ImageState, backend: ImageBackend) -> Sequence[int]:
        """The rows that pay for it in each step that is left to a request."""
        return ()

    def batch_rows(self, batch: Sequence[ImageState], backend: ImageBackend, group: BatchGroup, rows: int) -> int:
        """The rows that pay for it in the next step of these requests, a forward of so many rows."""
        return 0

    def relaunches(self, batch: Sequence[ImageState], group: BatchGroup) -> bool:
        """Whether it replaces what is compiled or recorded of the next step of these requests."""
        return False

    def low_rank(self, lease: Any) -> tuple[ScaledAdapter, ...]:
        """The low-rank branches of the request's rows."""
        return ()

    def evaluate(self, batch: StepBatch) -> Mapping[str, list[Any]]:
        """Options of the denoiser in a deep step."""
        return {}

    def keep(self, states: Sequence[ImageState], options: Mapping[str, Any]) -> None:
        """Keep of a deep step's options what shallow steps need."""

    def evaluate_shallow(self, states: Sequence[ImageState], rows: int) -> dict[str, Any]:
        """Options of the denoiser in a shallow step."""
        return {}

    def clear_cache(self) -> None:
        """Release what is kept of the last batch."""

    # -- pictures ---------------------------------------------------------------------------------------------------

    finishes: ClassVar[bool] = False  # whether decoded pictures go through `finish`

    def finish(self, request: ImageParameters, lease: Any, pixels: torch.Tensor) -> Finish:
        """What remains of a picture [H, W, 3] in levels, on the CPU."""
        raise TypeError(f"{type(self).__name__} finishes no picture")

    def digests(self, state: ImageState) -> Mapping[str, str]:
        """The digests of the files that a request was drawn with, by their names."""
        lease = state.extensions.get(self.field)
        return {} if lease is None else self._lease_digests(lease)

    def _lease_digests(self, lease: Any) -> Mapping[str, str]:
        """The same of a lease."""
        return {}


class PictureExtension(Extension[F]):
    """A kind whose field is a list of pictures, each read by a network of its name, in a part of the steps."""

    waits, steps = True, True
    picture: ClassVar[type[PictureInput]]
    supported: ClassVar[str]  # the family's attribute that says whether it takes any

    def _refusal(self) -> str | None:
        family = self.model.family
        if not getattr(family, self.supported):
            return f"is not supported by {family.label}"
        return super()._refusal()

    def rows_left(self, request: ImageParameters, state: ImageState, backend: ImageBackend) -> list[int]:
        pictures: Sequence[PictureInput] = getattr(request, self.field)
        paid = [self.picture.PAID(acts) for acts in zip(*map(state.acts, pictures), strict=True)]
        left = slice(state.step, None)
        return [n * w * deep for n, w, deep in zip(paid[left], state.widths[left], state.plan[left], strict=True)]


@contextmanager
def invalid(field: str) -> Iterator[None]:
    """Context that turns errors of files into errors of a request's field."""
    try:
        yield
    except ModelError as error:
        raise Invalid(field, error.detail) from error
