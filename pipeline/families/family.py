"""Defines a model family as functions and data, and a loaded model of one.

A family is a folder of `pipeline/families/` with a `Family`, `FAMILY`, and a line of `pipeline.families.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from contract.card import FULL, TINY, ImageDefaults, Size, SizeRange
from pipeline.checkpoints.folder import Part
from pipeline.sampling import samplers
from pipeline.sizes import size_range, sizes

if TYPE_CHECKING:
    import torch

    from contract.image import ImageParameters
    from contract.schedule import NoiseSchedule
    from core.ops.ops import Lowering
    from core.quant.convert import Recipe
    from pipeline.plans import TunedGate
    from pipeline.sampling.denoise import Conditioning
    from pipeline.sampling.sigmas import SamplerTable
    from pipeline.text.encode import Embedding, TextEncoder
    from unet_opt.inputs import DenoiserInputs


class TinyVae(NamedTuple):
    """A small decoder in place of a model's VAE: diffusers' AutoencoderTiny. `digest` identifies its weights."""

    network: Any
    digest: str


@dataclass(eq=False)
class ImageModel:
    """The parts of one model, in evaluation mode on one device. `digest` identifies its weights."""

    name: str
    digest: str
    precision: str
    device: torch.device
    dtype: torch.dtype
    family: Family
    parts: Mapping[str, Any]  # by the names of `family.parts`
    scheduler_config: dict[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)  # the family's own, of model_index.json
    embed: Embed | None = None  # computes the phase `TEXT` in place of the family's own `embed`
    student: ImageDefaults | None = None  # how it is drawn, if it is one of few steps
    scheduler_reason: str = ""  # why `scheduler_config` is not its file's (`pipeline.sampling.nearest`)
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # tuned for it (`pipeline.plans`)
    gates: Mapping[str, TunedGate] = field(default_factory=dict)  # of cascades, by draft model (`pipeline.plans`)
    tiny_vae: TinyVae | None = None
    tiled_above: int = 1536 * 1536  # pixels; larger pictures go through the VAE in tiles
    max_pixels: int = 0  # of a picture; 0: as `size_range` says
    trained: tuple[Size, ...] = ()  # sizes that it was trained at besides those that follow from its native one

    @property
    def denoiser(self) -> Any:
        """Return the network that is run at every step: a UNet or a transformer."""
        return self.parts[self.family.denoiser]

    @property
    def defaults(self) -> ImageDefaults:
        """Return the defaults of requests: the student's, or the family's."""
        return self.student or self.family.defaults

    @property
    def vae(self) -> Any:
        return self.parts["vae"]

    @property
    def vae_scale(self) -> int:
        """Return the pixels per latent, along one side."""
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    @property
    def input_channels(self) -> int:
        """Return the channels of what the denoiser reads at every step."""
        return int(self.denoiser.config.in_channels)

    @property
    def inpaints(self) -> bool:
        """Return whether the denoiser reads a mask and a masked image's latents beside the sample."""
        return self.input_channels == 2 * self.latent_channels + 1

    @property
    def samplers(self) -> tuple[str, ...]:
        """Return the samplers that a request may name."""
        return samplers.offered(self.scheduler_config, self.family.samplers)

    @property
    def vaes(self) -> tuple[str, ...]:
        """Return the decoders that a request may name."""
        return (FULL,) if self.tiny_vae is None else (FULL, TINY)

    @property
    def native(self) -> int:
        """Return the native side length of a square image, in pixels."""
        return self.family.native(self)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Return the (width, height) pairs that it is best at, in pixels."""
        allowed = [size for size in self.trained if not self.max_pixels or size[0] * size[1] <= self.max_pixels]
        return tuple(sorted({*sizes(self.native, self.family.grid(self)), *allowed}))

    @property
    def size_range(self) -> SizeRange:
        """Return the range of all sizes that it draws."""
        return size_range(self.native, self.family.multiple(self), self.max_pixels)

    def sampler_table(
        self, name: str, steps: int, size: Size, begin: int = 0, schedule: NoiseSchedule | None = None
    ) -> SamplerTable:
        """Return the sampler's table for a picture of this size. Raises ValueError, as `sigmas.table`."""
        from contract.schedule import OWN
        from pipeline.sampling import sigmas

        tokens = self.family.image_tokens(self, size)
        return sigmas.table(self.scheduler_config, name, steps, begin, tokens, schedule or OWN)

    def with_parts(self, **parts: Any) -> ImageModel:
        """Return the same model with these parts in place of its own."""
        return replace(self, parts={**self.parts, **parts})


Embed = Callable[[Sequence["torch.Tensor"]], "tuple[torch.Tensor, ...]"]
"""`Family.embed` of one model."""


Prepare = Callable[["torch.Tensor"], "torch.Tensor"]
"""What the denoiser computes of the text alone, once a request: [B, T, D] to [B, T, width]."""


class Network(Protocol):
    """A denoiser of a family on one lowering.

    text_width: channels of what `prepare_text` returns.
    shallow_reads_text: whether `shallow` needs the text.
    """

    lowering: Any
    text_width: int
    shallow_reads_text: bool

    def prepare_text(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute what the denoiser reads of the text alone, once a prompt: [B, T, D] to [B, T, width]."""
        ...

    def deep(self, inputs: DenoiserInputs) -> tuple[torch.Tensor, ...]:
        """Run the whole network: output [B, C, h, w], and features.

        Features [B, …, channels] are what `shallow` reads of a deep step; the next call may overwrite them. Where the
        family says `controls` or `image_prompts`, what these add are further arguments, as of `SplitUNet`.
        """
        ...

    def shallow(
        self, depth: str, inputs: DenoiserInputs, features: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Run a shallow step of this depth on features of an earlier deep one: the output [B, C, h, w]."""
        ...

    def select_features(self, features: Sequence[torch.Tensor], depth: str) -> tuple[torch.Tensor, ...]:
        """Select from all features that `deep` returns those that a shallow step of this depth reads."""
        ...

    def feature_shapes(self, depth: str, height: int, width: int) -> list[tuple[int, ...]]:
        """Return the shape of one row of each feature that a shallow step of this depth reads, by latents' sides."""
        ...


class Seeded(NamedTuple):
    """A model with random weights that is built in code."""

    build: Callable[[torch.device], dict[str, Any]]  # its parts, by name; the scheduler as an object
    on_device: bool  # weights are drawn on the device, by its own generator
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Adapters:
    """The reader of a family's LoRA files.

    parts: the parts that they may change, the denoiser first.
    models: the family's models in messages, with an article.
    to_diffusers: the file's tensors under diffusers' names, each beginning with its part's, and alphas by tensor name.
    to_peft: keys in one part under peft's names (`layer.lora_A.weight`), each with its name in the file.
    """

    parts: tuple[str, ...]
    models: str
    to_diffusers: Callable[
        [dict[str, torch.Tensor], Mapping[str, Any]], tuple[dict[str, torch.Tensor], dict[str, float]]
    ]
    to_peft: Callable[[str, Sequence[str]], dict[str, str]]


def on_first_call(module: str, name: str) -> Callable[..., Any]:
    """Return a function or class of a module that the first call imports: those that import torch."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **options)

    return call


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A kind of diffusion model. Importing one imports no torch: `on_first_call` is for functions that do.

    label: its name in messages.
    pipelines: the `_class_name`s of model_index.json that it reads; the first is its own.
    parts: the parts of a model's folder, in order.
    denoiser: the part that is run at every step.
    samplers: the names of `pipeline.sampling.samplers` that it offers.
    defaults: of requests.
    adapters: how its LoRAs are read.
    alpha: the usual strength of SmoothQuant in its recipe.
    prompt_fields: of `contract.prompts.FIELDS` those that it reads.
    scheduler_settings: settings that replace those of scheduler_config.json.
    padded: the conditioning tensors of variable length (dimension 1), each with a number of which the length in a batch
        is a multiple; they are padded with zeros.
    longest: the longest that each of these can be.
    calibration: what is different from `unet_opt.calibrate.CalibrationSettings`.
    language_model: the part that is a decoder-only language model, whose states before the last layer are a prompt's
        embedding; None: the text encoders are of other kinds.
    controls: whether control networks may run beside its denoiser.
    image_prompts: whether its denoiser's cross-attention may read those of IP-Adapters.
    refines: the label of the family whose last steps it takes; "": it draws pictures itself.

    Functions of files:

    reads: whether a model_index.json is of this family; default: by `pipelines`.
    seeded: the seeded model of a name, if there is one.
    options: what model_index.json says beside the parts, as `ImageModel.options`.
    check: raises `ModelError` for parts that load but do not form a model together, by the model's name.

    Functions of a loaded model:

    native: the native side length of a square image, in pixels.
    multiple: every side is a multiple of this many pixels.
    grid: the sizes that it is best at have sides that are multiples of this many pixels.
    image_tokens: the tokens of a picture of a size, where the sampler's schedule may depend on them.
    embedding_widths: the channels of each encoder's token embeddings by its key in files of textual inversions.

    Functions that compute:

    embed: the text encoders' forward, on torch: each tokenizer's ids [B, T] to the tensors of embeddings, [B, …].
    text_encoder: the `TextEncoder` of a model, and of what computes its `Embed` (default: `embed`).
    condition: the conditioning of a request, from the embeddings of its negative prompt, if any, and its prompt.
    example: random conditioning tensors for rows of the longest prompt of so many chunks (`RequestPrompts`), by the
        model, the network's `text_width`, the rows, a generator and the chunks.
    check_network: raises ValueError for a denoiser of an unsupported layout, or heads of another width than a multiple
        of `head_multiple`.
    network: the denoiser on a lowering. Raises ValueError for an unsupported layout or layer.
    recipe: the quantization recipe of a denoiser. `alpha` None: without SmoothQuant.
    """

    label: str
    pipelines: tuple[str, ...]
    parts: Mapping[str, Part]
    denoiser: str
    samplers: tuple[str, ...]
    defaults: ImageDefaults
    adapters: Adapters
    alpha: float
    prompt_fields: Collection[str] = ()
    scheduler_settings: Mapping[str, Any] = field(default_factory=dict)
    padded: Mapping[str, int] = field(default_factory=dict)
    longest: Mapping[str, int] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    language_model: str | None = None
    controls: bool = False
    image_prompts: bool = False
    refines: str = ""

    reads: Callable[[Mapping[str, Any]], bool] | None = None
    seeded: Callable[[str], Seeded | None] = lambda name: None
    options: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda index: {}
    check: Callable[[str, Mapping[str, Any]], None]

    native: Callable[[ImageModel], int]
    multiple: Callable[[ImageModel], int]
    grid: Callable[[ImageModel], int]
    image_tokens: Callable[[ImageModel, Size], int] = lambda model, size: 0
    embedding_widths: Callable[[ImageModel], Mapping[str, int]] = lambda model: {}

    embed: Callable[[ImageModel, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    text_encoder: Callable[..., TextEncoder]
    condition: Callable[[ImageModel, ImageParameters, Sequence[Embedding], Prepare], Conditioning]
    example: Callable[[ImageModel, int, int, torch.Generator, int], dict[str, torch.Tensor]]
    check_network: Callable[..., None]
    network: Callable[[Lowering, Any], Network]
    recipe: Callable[..., Recipe]

    @property
    def quantized(self) -> tuple[str, ...]:
        """Return the parts that may have quantized variants, the denoiser first."""
        return self.denoiser, "vae"

    def recipes(self, parts: Mapping[str, Any], alpha: float | None) -> dict[str, Recipe]:
        """Return the quantization recipe of each part in `quantized`. `alpha` None: without SmoothQuant."""
        from unet_opt.recipe import decoder

        return {self.denoiser: self.recipe(parts[self.denoiser], alpha=alpha), "vae": decoder(parts["vae"])}

    def rows(self, model: ImageModel, parameters: ImageParameters) -> int:
        """Return the rows of a request in a forward: 2 with classifier-free guidance, else 1.

        Distilled models take the guidance scale as an input, in one row.
        """
        distilled = getattr(model.denoiser.config, "time_cond_proj_dim", None) is not None
        return 1 if distilled else self.defaults.rows(parameters.guidance_scale)

    def negative(self, model: ImageModel, parameters: ImageParameters) -> str | None:
        """Return the negative prompt of a request with two rows; None: no text is encoded for it."""
        absent = None if model.options.get("force_zeros") else ""
        return absent if parameters.negative_prompt is None else parameters.negative_prompt

    def example_ids(self, model: ImageModel, rows: int) -> list[torch.Tensor]:
        """Return ids of the longest prompt for `embed`."""
        import torch

        shape, tokenizers = (rows, self.text_encoder(model).tokens), [n for n in model.parts if "tokenizer" in n]
        return [torch.zeros(shape, dtype=torch.long, device=model.device) for _ in tokenizers]
