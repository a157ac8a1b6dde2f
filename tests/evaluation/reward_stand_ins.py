"""Writes small seeded weights in the layouts of published reward models, and the pictures and captions to score.

Needs numpy, torch, safetensors and Pillow alone: the published implementations run it in an environment of their own.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]

CAPTIONS = (
    "a red apple on a table",
    "Two CATS, beside a dog!",
    "a table " * 20 + "and a dog",  # more than ImageReward reads
    "naïve café: 3 dogs",
    "cat",
)
SIZES = ((224, 224), (300, 128), (131, 317), (48, 64), (640, 480))  # width, height
WORDS = (
    "a", "red", "apple", "on", "table", "two", "cats", "beside", "dog", "and", "cat", "!", ":", ",", "3", "##s", "cafe",
)  # fmt: skip
QWEN_TOKENS = [
    f"<|{name}|>"
    for name in (
        "endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start",
        "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad",
    )
]  # fmt: skip
QWEN_IDS = {
    "bos": "endoftext", "eos": "im_end", "vision_start": "vision_start", "vision_end": "vision_end",
    "vision": "vision_pad", "image": "image_pad", "video": "video_pad",
}  # fmt: skip
# Qwen2-VL-7B-Instruct's, for conversations of one picture each.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pictures() -> list[np.ndarray]:
    """uint8 [H, W, 3]: smooth, with blocks."""
    draw, found = np.random.RandomState(3), []
    for width, height in SIZES:
        coarse = Image.fromarray(draw.randint(0, 256, (5, 6, 3)).astype(np.uint8))
        found.append(np.array(coarse.resize((width, height), Image.Resampling.BILINEAR)))
        found[-1][: height // 3, : width // 4] = draw.randint(0, 256, 3)
    return found


def image_reward(folder: Path) -> Path:
    """`ImageReward.pt`, `med_config.json` and `vocab.txt`: as published, but for depth, heads and widths."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", "utf-8")
    config = {
        "architectures": ["BertModel"], "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 48,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 40, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": len(vocabulary) + 2,
        "encoder_width": 768, "add_cross_attention": True,
    }  # fmt: skip
    (folder / "med_config.json").write_text(json.dumps(config), "utf-8")
    vision, wide, text, inner = 128, 96, 768, 48
    shapes: Shapes = {"cls_token": (1, 1, vision), "pos_embed": (1, 197, vision)}
    shapes |= _affine("patch_embed.proj", vision, 3, 16, 16) | _norm("norm", vision)
    for block in ("blocks.0", "blocks.1"):
        shapes |= _norm(f"{block}.norm1", vision) | _norm(f"{block}.norm2", vision)
        shapes |= _affine(f"{block}.attn.qkv", 3 * vision, vision) | _affine(f"{block}.attn.proj", vision, vision)
        shapes |= _affine(f"{block}.mlp.fc1", wide, vision) | _affine(f"{block}.mlp.fc2", vision, wide)
    whole = {f"blip.visual_encoder.{name}": shape for name, shape in shapes.items()}
    shapes = {"word_embeddings.weight": (len(vocabulary) + 2, text), "position_embeddings.weight": (40, text)}
    shapes |= _norm("LayerNorm", text)
    whole |= {f"blip.text_encoder.embeddings.{name}": shape for name, shape in shapes.items()}
    for layer in ("0", "1"):
        shapes = _affine("intermediate.dense", inner, text) | _affine("output.dense", text, inner)
        shapes |= _norm("output.LayerNorm", text)
        for attention, read in (("attention", text), ("crossattention", vision)):
            shapes |= _affine(f"{attention}.self.query", text, text) | _affine(f"{attention}.self.key", text, read)
            shapes |= _affine(f"{attention}.self.value", text, read) | _affine(f"{attention}.output.dense", text, text)
            shapes |= _norm(f"{attention}.output.LayerNorm", text)
        whole |= {f"blip.text_encoder.encoder.layer.{layer}.{name}": shape for name, shape in shapes.items()}
    whole |= _affine("blip.vision_proj", 256, vision) | _affine("blip.text_proj", 256, text)
    for layer, sizes in (("0", (1024, text)), ("2", (128, 1024)), ("4", (64, 128)), ("6", (16, 64)), ("7", (1, 16))):
        whole |= _affine(f"mlp.layers.{layer}", *sizes)
    found = _drawn(whole) | {"blip.text_encoder.embeddings.position_ids": torch.arange(40)[None]}
    torch.save(found, folder / "ImageReward.pt")
    return folder


def _affine(name: str, out: int, *inside: int) -> Shapes:
    return {f"{name}.weight": (out, *inside), f"{name}.bias": (out,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _drawn(shapes: Shapes) -> dict[str, Tensor]:
    """Each weight from a seed of its own: matrices keep the scale of what they are given, norms are about 1."""
    found = {}
    for name, shape in shapes.items():
        noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        if len(shape) == 1:
            noise = 0.1 * noise + (1 if "norm" in name.lower() and name.endswith("weight") else 0)
        elif "embed" not in name or "patch" in name:
            noise *= (3 if name.startswith("rm_head") else 1) / np.sqrt(np.prod(shape[1:]))
        found[name] = torch.tensor(noise, dtype=torch.float32)
    return found


def hpsv3(folder: Path) -> Path:
    """`HPSv3.safetensors`, and `config.json` and the tokenizer of Qwen2-VL-7B-Instruct: as published, but for depth,
    widths and the vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = _byte_pairs(folder)
    added = {len(words) + number: name for number, name in enumerate(QWEN_TOKENS)}
    said = {
        "add_prefix_space": False, "bos_token": None, "clean_up_tokenization_spaces": False,
        "additional_special_tokens": QWEN_TOKENS[1:], "eos_token": "<|im_end|>", "errors": "replace",
        "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
        "split_special_tokens": False,
        "added_tokens_decoder": {
            str(key): {"content": name, "special": True, "lstrip": False, "normalized": False, "rstrip": False}
            for key, name in added.items()
        },
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(said), "utf-8")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}), "utf-8")
    ids = {name: key for key, name in added.items()}
    hidden, inner, layers, vision, depth = 256, 64, 2, 64, 2
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0,
        **{f"{key}_token_id": ids[f"<|{name}|>"] for key, name in QWEN_IDS.items()}, "hidden_act": "silu",
        "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": inner, "max_position_embeddings": 4096,
        "max_window_layers": layers, "model_type": "qwen2_vl", "num_attention_heads": 2, "num_hidden_layers": layers,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
        "vision_config": {
            "depth": depth, "embed_dim": vision, "mlp_ratio": 4, "num_heads": 2, "in_chans": 3, "hidden_size": hidden,
            "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": len(words) + 40,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    rows = len(words) + len(QWEN_TOKENS) + 1
    shapes: Shapes = {"visual.patch_embed.proj.weight": (vision, 3, 2, 14, 14)}
    for block in (f"visual.blocks.{number}" for number in range(depth)):
        shapes |= _norm(f"{block}.norm1", vision) | _norm(f"{block}.norm2", vision)
        shapes |= _affine(f"{block}.attn.qkv", 3 * vision, vision) | _affine(f"{block}.attn.proj", vision, vision)
        shapes |= _affine(f"{block}.mlp.fc1", 4 * vision, vision) | _affine(f"{block}.mlp.fc2", vision, 4 * vision)
    shapes |= _norm("visual.merger.ln_q", vision) | _affine("visual.merger.mlp.0", 4 * vision, 4 * vision)
    shapes |= _affine("visual.merger.mlp.2", hidden, 4 * vision)
    shapes |= {f"{name}.weight": (rows, hidden) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = (hidden,)
    for layer in (f"model.layers.{number}" for number in range(layers)):
        shapes |= _affine(f"{layer}.self_attn.q_proj", hidden, hidden)
        shapes |= _affine(f"{layer}.self_attn.k_proj", 128, hidden) | _affine(f"{layer}.self_attn.v_proj", 128, hidden)
        shapes |= {
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden), f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden), f"{layer}.mlp.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    shapes |= _affine("rm_head.0", 1024, hidden) | _affine("rm_head.3", 16, 1024) | _affine("rm_head.5", 2, 16)
    save_file(_drawn(shapes), folder / "HPSv3.safetensors")
    return folder


def _byte_pairs(folder: Path) -> dict[str, int]:
    """Writes `vocab.json` and `merges.txt`: GPT-2's bytes, and merges that build some words letter by letter."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(others))]
    merges: list[str] = []
    for word in ("the", "image", "and", "of", "a", "table", "prompt", "s"):
        begun = f"\u0120{word}"  # by a blank
        pairs = (f"{begun[:end]} {begun[end]}" for end in range(1, len(begun)))
        merges += [pair for pair in pairs if pair not in merges]
    words = {word: number for number, word in enumerate([*letters, *(pair.replace(" ", "") for pair in merges)])}
    (folder / "vocab.json").write_text(json.dumps(words), "utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", "utf-8")
    return words
