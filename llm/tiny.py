"""Llamas with seeded random weights, made in code, for tests and benchmarks. What they write means nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY, LLAMA_100M = "random:llama-tiny", "random:llama-100m"
_SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim + "
    "'<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """What distinguishes one Llama from another. Its tokens are bytes; a larger vocabulary has tokens of no text."""

    vocabulary: int = 262
    width: int = 32
    inner: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context: int = 512
    tied: bool = True


SHAPES = {
    TINY: Shape(),
    # 100 million parameters, in the proportions of Llama 3's.
    LLAMA_100M: Shape(
        vocabulary=16_000, width=768, inner=2048, layers=12, heads=12, kv_heads=4, head_dim=64, context=2048, tied=False
    ),
}


def make(shape: Shape, seed: int = 0) -> tuple[Any, Any]:
    """A network and its tokenizer. Equal seeds, equal weights; the random state of torch stays as it was."""
    import torch
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config = LlamaConfig(
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
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = LlamaForCausalLM(config)
    return network, tokenizer(shape.context)


def tokenizer(context: int) -> Any:
    """Every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*_SPECIAL, *letters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>",
        additional_special_tokens=list(_SPECIAL[3:]), model_max_length=context,
    )  # fmt: skip
    made.chat_template = _TEMPLATE
    return made


def save(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write a model of this shape as `save_pretrained` does."""
    network, words = make(shape, seed)
    network.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
