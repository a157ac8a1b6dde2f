"""The protocol of what a request brings along: files of a folder, what is made of them, what that adds to its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from contract.errors import Invalid
from pipeline.checkpoints.folder import ModelError
from pipeline.extensions.asset_folder import AssetFolder

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from contract.image import ImageParameters
    from core.config import Settings
    from pipeline.backends.backend import BatchGroup, ImageBackend
    from pipeline.extensions.adapters import ScaledAdapter
    from pipeline.families.family import ImageModel
    from pipeline.request_state import ImageState
    from pipeline.text.conditioning import Conditioner
    from pipeline.text.textual_inversion import EmbeddingFolder
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
    """The rest of a decoded picture's work, one iteration at a time: `left` more, after `done`."""

    done: int

    @property
    def left(self) -> int: ...

    def compute(self) -> None:
        """Run the next iteration; to be repeated until `done` is raised."""
        ...

    def image(self) -> Image:
        """Return the whole picture, after the last one."""
        ...


class Steps:
    """The part of one kind in the denoiser's steps: what it adds to them, and the rows that pay for it."""

    def __init__(self, field: str, share: float) -> None:
        """`share` of a step of the denoiser is the cost of its rows until one was measured."""
        self.field, self.share = field, share

    def charged_rows(self, states: Sequence[ImageState], backend: ImageBackend, total: int, ahead: int = 0) -> int:
        """Count the rows that pay for it in a forward of `total` rows: the step of these requests that is so many steps
        `ahead` of the next.
        """
        raise NotImplementedError

    def group(self, lease: Any) -> tuple[int, ...]:
        """Return what requests must have in common to share a forward in which bits depend on it."""
        return ()

    def relaunches(self, states: Sequence[ImageState], group: BatchGroup) -> bool:
        """Return whether it replaces what is compiled or recorded of the next step of these requests."""
        return False

    def low_rank(self, lease: Any) -> tuple[ScaledAdapter, ...]:
        """Return the low-rank branches of the request's rows."""
        return ()

    def evaluate(self, batch: StepBatch) -> Mapping[str, list[Any]]:
        """Compute options of the denoiser in a deep step."""
        return {}

    def keep(self, states: Sequence[ImageState], options: Mapping[str, Any]) -> None:
        """Keep of a deep step's options what shallow steps need."""

    def evaluate_shallow(self, states: Sequence[ImageState], rows: int) -> dict[str, Any]:
        """Compute options of the denoiser in a shallow step."""
        return {}

    def clear_cache(self) -> None:
        """Release what is kept of the last batch."""

    def _leases(self, states: Iterable[ImageState]) -> list[tuple[ImageState, Any]]:
        return [(state, state.extensions[self.field]) for state in states if self.field in state.extensions]


class Extension(Generic[F]):
    """One kind of what requests bring along, under the `field` of their parameters.

    A request's part is a *lease*: whatever `acquire` returns, kept in `ImageState.extensions` until `release`. Every
    kind overrides the methods that it needs; those of this class stand for a kind that reserves nothing.
    """

    field: ClassVar[str]
    card_field: ClassVar[str]  # of the model's card: the names that requests may use
    model_field: ClassVar[str] = ""  # named in errors of files; "": `field`
    unconfigured: str = ""  # why requests are refused without a folder
    supported: ClassVar[str] = ""  # the family's attribute that says whether it takes any; "": all do
    printed_as: ClassVar[str] = ""  # the fingerprint's key of its files' digests; "": `field`
    waits: ClassVar[bool] = False  # whether `acquire` may have to wait for room for files
    finishes: ClassVar[bool] = False  # whether decoded pictures go through `finish`
    networks: ClassVar[str] = ""  # what its networks are called in errors

    steps: Steps | None = None  # None: it does not change the denoiser's steps
    backend: ImageBackend | None = None  # takes the steps of its requests; None: the main one
    conditioner: Conditioner | None = None  # encodes their prompts
    vocabulary: EmbeddingFolder | None = None  # of files that words of prompts name

    def __init__(self, model: ImageModel, backend: ImageBackend, folder: F | None = None) -> None:
        """`model` is `backend`'s before its parts were packed. Without a `folder` requests are refused."""
        self.model = model
        self.folder = folder

    @classmethod
    def open(cls, settings: Settings, model: ImageModel, backend: ImageBackend) -> Self:
        """Create the extension as the settings configure it: without a folder if the model takes none of its files."""
        raise NotImplementedError

    def asset_names(self) -> Sequence[str]:
        """List the names that requests may use now."""
        return () if self.folder is None else self.folder.asset_names()

    def costs(self, backend: ImageBackend, sizes: Iterable[tuple[int, int]]) -> dict[str, Any]:
        """Return its fields of the card's costs."""
        return {}

    def is_requested(self, request: ImageParameters) -> bool:
        """Return whether a request asks for it."""
        return bool(getattr(request, self.field, None))

    def check(self, request: ImageParameters) -> Any:
        """Return what `acquire` needs of a request that asks for it. In the caller's thread; reads files. Raises
        `Invalid`.
        """
        if self.refusal:
            raise Invalid(self.field, self.refusal)
        with invalid(self.model_field or self.field):
            return self._check_files(request)

    def size_bytes(self, request: ImageParameters, checked: Any, rows: int, chunks: int) -> int:
        """Return what a checked request holds beside its files, with so many chunks of text."""
        return 0

    def acquire(self, request: ImageParameters, checked: Any, *, wait: bool) -> Any:
        """Return a lease on the checked request's files; None: not yet, as of `AssetCache.take`. Reads none."""
        return checked

    def release(self, lease: Any, *, keep: bool = False) -> None:
        """End a lease; `keep`: it is soon asked for again."""
        if self.waits:
            self._files.cache.give(lease.files, keep=keep)

    def prepare(self, request: ImageParameters, state: ImageState, hidden: torch.Tensor) -> Iterable[torch.Tensor]:
        """Make the inputs of the steps, for the prompts' embeddings [R, T, D], unless they are there already, and
        return what its networks made, on one device. On the lane; may be repeated. Raises `Invalid`.
        """
        return ()

    def finite_steps(self, lease: Any) -> torch.Tensor | None:
        """Return bool []: whether all that its networks made in the request's steps is finite; None: they made none."""
        return None

    def finish(self, request: ImageParameters, lease: Any, pixels: torch.Tensor) -> Finish:
        """Return what remains of a picture [H, W, 3] in levels, on the CPU."""
        raise NotImplementedError

    def digests(self, state: ImageState) -> Mapping[str, str]:
        """Return the digests of the files that a request was drawn with, by their names."""
        lease = state.extensions.get(self.field)
        return {} if lease is None else {file.name: file.digest for file in self._used(lease)}

    def _used(self, lease: Any) -> Iterable[Any]:
        """Return what has the `name` and `digest` of each file of a lease."""
        return lease.files  # type: ignore[no-any-return]

    @property
    def refusal(self) -> str:
        """Why it is not offered; "" if it is."""
        family = self.model.family
        if self.supported and not getattr(family, self.supported):
            return f"is not supported by {family.label}"
        return self.unconfigured if self.folder is None else ""

    def _check_files(self, request: ImageParameters) -> Any:
        """`check` where it is offered. Raises `ModelError` too."""

    @property
    def _files(self) -> F:
        assert self.folder is not None
        return self.folder


@contextmanager
def invalid(field: str) -> Iterator[None]:
    """Context that turns errors of files into errors of a request's field."""
    try:
        yield
    except ModelError as error:
        raise Invalid(field, error.detail) from error
