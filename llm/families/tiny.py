"""Models of the text room's families with seeded random weights, built in code, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

TINY, LLAMA_100M = "random:llama-tiny", "random:llama-100m"
LLAMA_8B, LLAMA_70B = "random:llama-8b", "random:llama-70b"
QWEN3_TINY, MISTRAL_TINY = "random:qwen3-tiny", "random:mistral-tiny"
GEMMA2_TINY, GEMMA3_TINY = "random:gemma2-tiny", "random:gemma3-tiny"
MIXTRAL_TINY, QWEN3_MOE_TINY = "random:mixtral-tiny", "random:qwen3-moe-tiny"
_SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim + "
    "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class LlamaShape:
    """The dimensions of a Llama, or of a model of another `kind`, of `_KINDS`.

    Its tokens are bytes; a larger vocabulary has tokens without text. `window`: the last tokens that layers attend to
    which have a window in a model of this kind; 0: all.
    """

    vocabulary: int = 262
    width: int = 32
    inner: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context: int = 512
    tied: bool = True
    rope: Mapping[str, Any] | None = None
    kind: str = "llama"
    window: int = 0

    @property
    def parameters(self) -> int:
        each = self.width * (2 * self.heads + 2 * self.kv_heads) * self.head_dim + 3 * self.width * self.inner
        return self.layers * (each + 2 * self.width) + self.width * (1 + self.vocabulary * (1 if self.tied else 2))

    @property
    def large(self) -> bool:
        """Return whether weights are drawn directly on the target device and in the target dtype."""
        return self.parameters > 10**9


_LLAMA_3_1 = LlamaShape(
    vocabulary=128_256,
    width=4096,
    inner=14_336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    context=131_072,
    tied=False,
    rope={
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
# The class of each kind's models, in transformers.models, and its fields beside those that all have.
_KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama.modeling_llama.LlamaForCausalLM", {}),
    "mistral": ("mistral.modeling_mistral.MistralForCausalLM", {}),
    "qwen3": ("qwen3.modeling_qwen3.Qwen3ForCausalLM", {}),
    # Caps that bite on scores and logits of random weights.
    "gemma2": (
        "gemma2.modeling_gemma2.Gemma2ForCausalLM",
        {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        "gemma3.modeling_gemma3.Gemma3ForCausalLM", {"query_pre_attn_scalar": 16, "sliding_window_pattern": 3},
    ),
    "mixtral": ("mixtral.modeling_mixtral.MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3-moe": (
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}  # fmt: skip
SHAPES = {
    TINY: LlamaShape(),
    QWEN3_TINY: LlamaShape(kind="qwen3", width=48),
    MISTRAL_TINY: LlamaShape(kind="mistral", window=12, tied=False),
    GEMMA2_TINY: LlamaShape(kind="gemma2", window=12, tied=False),
    GEMMA3_TINY: LlamaShape(kind="gemma3", window=12, layers=3, tied=False),
    MIXTRAL_TINY: LlamaShape(kind="mixtral", window=12, tied=False),
    QWEN3_MOE_TINY: LlamaShape(kind="qwen3-moe", tied=False),
    # 100 million parameters, in the proportions of Llama 3's.
    LLAMA_100M: LlamaShape(
        vocabulary=16_000, width=768, inner=2048, layers=12, heads=12, kv_heads=4, head_dim=64, context=2048, tied=False
    ),
    # The published shapes of Llama-3.1-8B and Llama-3.1-70B.
    LLAMA_8B: _LLAMA_3_1,
    LLAMA_70B: replace(_LLAMA_3_1, width=8192, inner=28_672, layers=80, heads=64),
}


def make(shape: LlamaShape, seed: int = 0, *, device: str = "cpu", dtype: str = "float32") -> tuple[Any, Any]:
    """A network and its tokenizer. Equal seeds give equal weights; torch's random state is unchanged.

    Small ones are the same on every device. A large one is drawn on `device` and as `dtype`, and differs on another
    kind of device.
    """
    import torch

    path, fields = _KINDS[shape.kind]
    module, _, name = path.rpartition(".")
    model_class = getattr(import_module(f"transformers.models.{module}"), name)
    options = {**fields, **({} if shape.rope is None else {"rope_parameters": dict(shape.rope)})}
    if shape.kind != "llama":
        options["sliding_window"] = shape.window or None
    config = model_class.config_class(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        initializer_range=0.2 if shape.width < 256 else 0.02,  # wide enough that likelihoods differ
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    where = torch.device(device if shape.large else "cpu")
    usual = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[] if where.type == "cpu" else None), where:
        torch.manual_seed(seed)
        try:
            torch.set_default_dtype(getattr(torch, dtype if shape.large else "float32"))
            network = model_class(config)
        finally:
            torch.set_default_dtype(usual)
    if shape.large:
        _settle_(network, shape)
    return network, tokenizer(shape.context)


def _settle_(network: Any, shape: LlamaShape) -> None:
    """Scale weights so that every layer adds little to the embeddings, as in trained models.

    Branches are scaled by one over the root of their number (GPT-2; Radford et al., 2019), and embeddings have a
    deviation of 1. Without that the first layers drown the embeddings and each layer magnifies rounding: after 32
    layers no two precisions would agree.
    """
    network.model.embed_tokens.weight.data.mul_(1 / network.config.initializer_range)
    for layer in network.model.layers:
        for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
            branch.weight.data.mul_((2 * shape.layers) ** -0.5)


def tokenizer(context: int) -> Any:
    """Every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*_SPECIAL, *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        additional_special_tokens=list(_SPECIAL[3:]), model_max_length=context,
    )  # fmt: skip
    fast.chat_template = _TEMPLATE
    return fast


def save(folder: Path, shape: LlamaShape, seed: int = 0) -> Path:
    """Write a model of this shape as `save_pretrained` does."""
    network, words = make(shape, seed)
    network.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
