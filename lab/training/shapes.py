"""The architectures of the embedded models as plain configuration.

`EMOJI` is what ships; `SMOKE` has the same architectures at a size that trains in seconds, for tests. The image models'
are in pipeline.checkpoints.tiny.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.checkpoints import tiny


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

    vocab: int
    picture: tiny.SDXLShape
    vision_width: int
    vision_layers: int
    vision_heads: int
    lm_vocab: int
    lm: TrainedLlamaShape
    draft: TrainedLlamaShape
    draft_sources: tuple[int, ...]  # layers of `lm`, from 0, whose states the drafter reads
    draft_block: int = 12
    answers: int = 80_000  # of `lm`, that the drafter learns from
    chats: int = 120_000  # a shorter corpus is a beginning of a longer one
    scenes: int = 12_000  # captions of scenes that the vocabulary is learnt from

    def clip_vision(self, size: int) -> dict[str, Any]:
        """Arguments of `CLIPVisionConfig`: 64 patches whatever the picture's side, `size` in pixels."""
        return {
            "hidden_size": self.vision_width,
            "intermediate_size": 4 * self.vision_width,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.vision_heads,
            "image_size": size,
            "patch_size": size // 8,
            "projection_dim": self.picture.pooled_width,
            "hidden_act": "gelu",
        }

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
    vocab=3072,
    picture=tiny.EMOJI,
    vision_width=192,
    vision_layers=6,
    vision_heads=6,
    lm_vocab=4096,
    lm=TrainedLlamaShape(256, 6, 8, 4, 704),
    draft=TrainedLlamaShape(256, 2, 8, 4, 704),
    draft_sources=(1, 3, 4),
)

_SMOKE = tiny.SDXLShape(
    channels=(16, 32, 32),
    transformers=(1, 1, 2),
    heads=(1, 2, 2),
    text_width=32,
    text_heads=2,
    text_factor=4,
    text_activation="gelu",
    pooled_width=32,
    time_width=16,
    vae_groups=4,
    vae_attention=True,
    vae_upcast=False,
)

SMOKE = Shapes(
    vocab=640,
    picture=_SMOKE,
    vision_width=32,
    vision_layers=2,
    vision_heads=2,
    lm_vocab=640,
    lm=TrainedLlamaShape(64, 2, 4, 2, 128),
    draft=TrainedLlamaShape(64, 1, 4, 2, 128),
    draft_sources=(0,),
    answers=200,
    chats=2000,
    scenes=1000,
)

BY_NAME = {"emoji": EMOJI, "smoke": SMOKE}
