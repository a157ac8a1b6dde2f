"""Holds this project's figures against torchmetrics, torch-fidelity, clean-fid and MLPerf's own scripts.

Needs these packages, open_clip, and a checkout of github.com/mlcommons/inference, which is run as it is. Published
weights are not needed: seeded random ones of the published layouts are written to files that all implementations read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from evaluation import fid, mmd, pixels
from evaluation.clip import Clip
from evaluation.fid import FrechetDistance
from evaluation.inception import WEIGHTS, Inception
from evaluation.pixels import Pixels
from evaluation.run import EvaluationRun
from evaluation.stand_ins import inception_weights

PACKAGES = (
    "torch",
    "torchvision",
    "torchmetrics",
    "torch-fidelity",
    "clean-fid",
    "open_clip_torch",
    "scipy",
    "transformers",
)
_FULL = 2112  # pictures in a set, more than Inception's 2,048 features
_FEW = 256
_CLIP = 64
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_RESIZE = "its own Inception over the same weights fits pictures to 299×299 {}, and takes (x - 128) / 128"
_RANK = "fewer pictures than features: sqrtm of a singular product loses digits"


def sets(run: EvaluationRun) -> tuple[list[Pixels], list[Pixels]]:
    """Two sets of pictures, shifted in several ways for a full rank: of even captions, and negatives of odd ones.

    The FID of sets that are alike is far below their covariances, and little of their digits is left in it.
    """
    seen = [pixels.read(path) for path in run.files()]

    def shifted(part: Sequence[Pixels]) -> list[Pixels]:
        turns = -(-_FULL // len(part))
        return [np.roll(one, (13 * k, 29 * k), (0, 1)) for k in range(turns) for one in part][:_FULL]

    return shifted(seen[::2]), shifted([255 - one for one in seen[1::2]])


def row(figure: str, reference: str, ours: float, theirs: float, reason: str = "") -> dict[str, Any]:
    """`reason`: why the two may differ by more than rounding."""
    found = {"figure": figure, "reference": reference, "ours": ours, "theirs": theirs}
    return found | {"relative": abs(ours - theirs) / abs(theirs), "reason": reason}


def on_features(a: Tensor, b: Tensor) -> Iterator[dict[str, Any]]:
    """FID and KID by every implementation's formula, over the same features."""
    fidelity, kernel = import_module("torch_fidelity.metric_fid"), import_module("torch_fidelity.metric_kid")
    clean, official = import_module("cleanfid.fid"), import_module("fid.fid_score")
    of_torchmetrics = import_module("torchmetrics.image.kid")
    a, b = a.double(), b.double()
    x, y = a.numpy(), b.numpy()
    ours = FrechetDistance(b)(a)
    stats = [fidelity.fid_features_to_statistics(one) for one in (a, b)]
    theirs = fidelity.fid_statistics_to_metric(*stats, verbose=False)[fidelity.KEY_METRIC_FID]
    yield row("FID", "torch-fidelity, same features", ours, theirs)
    yield row("FID", "clean-fid, same features", ours, clean.fid_from_feats(x, y))
    moments = [part for one in stats for part in (one["mu"], one["sigma"])]
    yield row("FID", "MLPerf, same features", ours, float(official.calculate_frechet_distance(*moments)))
    ours = float(mmd.kid(a, b, torch.ones(1, len(a)))[0])
    yield row("KID", "torchmetrics, same features", ours, float(of_torchmetrics.poly_mmd(b, a)))
    found = kernel.kid_features_to_metric(
        a, b, kid_subsets=1, kid_subset_size=len(a), kid_kernel="poly", kid_kernel_poly_degree=3,
        kid_kernel_poly_gamma=None, kid_kernel_poly_coef0=1, rng_seed=0, verbose=False,
    )  # fmt: skip
    yield row("KID", "torch-fidelity, same features", ours, found[kernel.KEY_METRIC_KID_MEAN])
    yield row("KID", "clean-fid, same features", ours, clean.kernel_distance(x, y, 1, len(a)))


def on_pictures(a: Sequence[Pixels], b: Sequence[Pixels], network: Inception, work: Path) -> Iterator[dict[str, Any]]:
    """MLPerf's FID from pictures to figure: over a full rank, and over fewer pictures. `work` holds `WEIGHTS`."""
    official = import_module("fid.fid_score")
    torch.hub.set_dir(str(work))
    model = import_module("fid.inception").InceptionV3([3])
    ours = _features(network, a)
    for count, reason in ((_FULL, ""), (_FEW, _RANK)):
        images = [Image.fromarray(one) for one in b[:count]]
        mean, covariance = official.calculate_activation_statistics(images, model)
        np.savez(work / "b.npz", mu=mean, sigma=covariance)
        theirs = official.compute_fid(list(a[:count]), str(work / "b.npz"), "cpu", batch_size=32)
        found = FrechetDistance(fid.read(work / "b.npz", network.width))(ours[:count])
        yield row("FID", f"MLPerf, {count:,} pictures", found, float(theirs), reason)


def by_other_rules(ours: float, a: Sequence[Pixels], b: Sequence[Pixels], weights: Path) -> Iterator[dict[str, Any]]:
    """torchmetrics' FID over its own Inception, which torch-fidelity's is too, with the same weights."""
    metric = import_module("torchmetrics.image.fid").FrechetInceptionDistance
    for antialias, how in ((True, "with antialiasing"), (False, "as TensorFlow 1 does")):
        theirs = metric(feature_extractor_weights_path=str(weights), antialias=antialias)
        for part, real in ((b, True), (a, False)):
            for start in range(0, len(part), 32):
                batch = torch.from_numpy(np.stack(part[start : start + 32])).permute(0, 3, 1, 2)
                theirs.update(batch, real=real)
        name = "torchmetrics" if antialias else "torchmetrics, antialias=False"
        yield row("FID", f"{name}, {len(a)} pictures", ours, float(theirs.compute()), _RESIZE.format(how))


def clip_folder(folder: Path) -> None:
    """ViT-B/32 in transformers' format, with seeded random weights and open_clip's vocabulary."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    CLIPModel(CLIPConfig()).save_pretrained(folder)
    tokenizer = import_module("open_clip.tokenizer").SimpleTokenizer()
    special = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {special.get(word, word): number for word, number in tokenizer.encoder.items()}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    merges = "\n".join(" ".join(pair) for pair in tokenizer.bpe_ranks)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD}))


def open_clip_weights(w: dict[str, Tensor]) -> dict[str, Tensor]:
    """A CLIPModel's weights under open_clip's names."""
    made = {
        "logit_scale": w["logit_scale"],
        "text_projection": w["text_projection.weight"].T,
        "token_embedding.weight": w["text_model.embeddings.token_embedding.weight"],
        "positional_embedding": w["text_model.embeddings.position_embedding.weight"],
        "visual.proj": w["visual_projection.weight"].T,
        "visual.class_embedding": w["vision_model.embeddings.class_embedding"],
        "visual.positional_embedding": w["vision_model.embeddings.position_embedding.weight"],
        "visual.conv1.weight": w["vision_model.embeddings.patch_embedding.weight"],
    }
    norms = {
        "ln_final": "text_model.final_layer_norm", "visual.ln_pre": "vision_model.pre_layrnorm",
        "visual.ln_post": "vision_model.post_layernorm",
    }  # fmt: skip
    parts = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    parts["attn.out_proj"] = "self_attn.out_proj"
    for prefix, tower in (("", "text_model"), ("visual.", "vision_model")):
        for k in range(12):
            layer, block = f"{tower}.encoder.layers.{k}", f"{prefix}transformer.resblocks.{k}"
            norms |= {f"{block}.{theirs}": f"{layer}.{ours}" for theirs, ours in parts.items()}
            for kind in ("weight", "bias"):
                heads = [w[f"{layer}.self_attn.{one}_proj.{kind}"] for one in "qkv"]
                made[f"{block}.attn.in_proj_{kind}"] = torch.cat(heads)
    both = {f"{theirs}.{kind}": w[f"{ours}.{kind}"] for theirs, ours in norms.items() for kind in ("weight", "bias")}
    return {name: value.contiguous() for name, value in (made | both).items()}


def on_captions(run: EvaluationRun, work: Path) -> dict[str, Any]:
    """MLPerf's CLIP score, from pictures and captions to the figure."""
    from safetensors.torch import load_file

    folder = work / "clip"
    clip_folder(folder)
    torch.save(open_clip_weights(load_file(folder / "model.safetensors")), work / "open_clip.pt")
    encoder = import_module("clip.clip_encoder").CLIPEncoder("ViT-B-32-quickgelu", str(work / "open_clip.pt"))
    seen = [pixels.read(path) for path in run.files()[:_CLIP]]
    texts = [caption.text for caption in run.captions[:_CLIP]]
    theirs = [100 * encoder.get_clip_score(t, Image.fromarray(p)).item() for t, p in zip(texts, seen, strict=True)]
    clip = Clip(folder)
    ours = 100 * (clip.see(seen).double() * clip.read(texts).double()).sum(1)
    return row("CLIP score", f"MLPerf, {_CLIP} pictures", float(ours.mean()), float(np.mean(theirs)))


def _features(network: Inception, pictures: Sequence[Pixels]) -> Tensor:
    return torch.cat([network.see(pictures[start : start + 32]) for start in range(0, len(pictures), 32)])


def compare(run: EvaluationRun, work: Path) -> dict[str, Any]:
    """Every figure by every implementation. `work` is for files on the way."""
    (work / "checkpoints").mkdir()
    weights = work / "checkpoints" / WEIGHTS
    torch.save(inception_weights(), weights)
    network = Inception(weights)
    rows = [on_captions(run, work)]
    a, b = sets(run)
    seen = [_features(network, one) for one in (a, b)]
    rows += on_features(*seen)
    rows += on_pictures(a, b, network, work)
    few = FrechetDistance(seen[1][:_FEW])(seen[0][:_FEW])
    rows += by_other_rules(few, a[:_FEW], b[:_FEW], weights)
    return {"pictures": _FULL, "rows": rows, "versions": {name: metadata.version(name) for name in PACKAGES}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.evaluation.agreement", description=__doc__)
    parser.add_argument("--mlperf", type=Path, required=True, metavar="DIR", help="a checkout of mlcommons/inference")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="a finished run, for its pictures")
    options = parser.parse_args()
    sys.path.insert(0, str(options.mlperf / "text_to_image" / "tools"))
    with tempfile.TemporaryDirectory() as work:
        print(json.dumps(compare(EvaluationRun.read(options.run), Path(work))))


if __name__ == "__main__":
    main()
