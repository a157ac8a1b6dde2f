"""Llamas and Qwen3s with seeded random weights, built in code, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY, LLAMA_100M, LLAMA_8B = "random:llama-tiny", "random:llama-100m", "random:llama-8b"
QWEN3_TINY = "random:qwen3-tiny"
_SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim + "
    "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class LlamaShape:
    """The dimensions of a Llama, or of a Qwen3 (`kind` "qwen3").

    Its tokens are bytes; a larger vocabulary has tokens without text.
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

    @property
    def parameters(self) -> int:
        each = self.width * (2 * self.heads + 2 * self.kv_heads) * self.head_dim + 3 * self.width * self.inner
        return self.layers * (each + 2 * self.width) + self.width * (1 + self.vocabulary * (1 if self.tied else 2))

    @property
    def large(self) -> bool:
        """Return whether weights are drawn directly on the target device and in the target dtype."""
        return self.parameters > 10**9


SHAPES = {
    TINY: LlamaShape(),
    QWEN3_TINY: LlamaShape(kind="qwen3", width=48),
    # 100 million parameters, in the proportions of Llama 3's.
    LLAMA_100M: LlamaShape(
        vocabulary=16_000, width=768, inner=2048, layers=12, heads=12, kv_heads=4, head_dim=64, context=2048, tied=False
    ),
    # The published shape of Llama-3.1-8B.
    LLAMA_8B: LlamaShape(
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
    ),
}


def make(shape: LlamaShape, seed: int = 0, *, device: str = "cpu", dtype: str = "float32") -> tuple[Any, Any]:
    """A network and its tokenizer. Equal seeds give equal weights; torch's random state is unchanged.

    Small ones are the same on every device. A large one is drawn on `device` and as `dtype`, and differs on another
    kind of device.
    """
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }  # fmt: skip
    config_class, model_class = kinds[shape.kind]
    options = {} if shape.rope is None else {"rope_parameters": dict(shape.rope)}
    config = config_class(
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
