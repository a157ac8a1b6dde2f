"""The architectures of the embedded language models as plain configuration.

`EMOJI` is what ships; `SMOKE` has the same architectures at a size that trains in seconds, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainedLlamaShape:
    """A Llama with grouped-query attention: `kv_heads` shared by `heads` queries, tied embeddings."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


@dataclass(frozen=True)
class Shapes:
    """Every size of every model, and the number of chats that the language models' corpus is drawn from."""

    lm_vocab: int
    lm: TrainedLlamaShape
    draft: TrainedLlamaShape
    draft_sources: tuple[int, ...]  # layers of `lm`, from 0, whose states the drafter reads
    draft_block: int = 12
    answers: int = 80_000  # of `lm`, that the drafter learns from
    chats: int = 120_000  # a shorter corpus is a beginning of a longer one

    def llama(self, shape: TrainedLlamaShape, vocab: int, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """Arguments of `LlamaConfig`."""
        return {
            "vocab_size": vocab,
            "hidden_size": shape.width,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
        }


EMOJI = Shapes(
    lm_vocab=4096,
    lm=TrainedLlamaShape(256, 6, 8, 4, 704),
    draft=TrainedLlamaShape(256, 2, 8, 4, 704),
    draft_sources=(1, 3, 4),
)

SMOKE = Shapes(
    lm_vocab=640,
    lm=TrainedLlamaShape(64, 2, 4, 2, 128),
    draft=TrainedLlamaShape(64, 1, 4, 2, 128),
    draft_sources=(0,),
    answers=200,
    chats=2000,
)

BY_NAME = {"emoji": EMOJI, "smoke": SMOKE}
