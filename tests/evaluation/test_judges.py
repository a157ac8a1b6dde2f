"""Further judges: rewards as their authors compute them, and a run that has the figures of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

from evaluation import judges, mmd, pixels
from evaluation.clip import Clip
from evaluation.dinov2 import DinoV2
from evaluation.fid import FrechetDistance
from evaluation.inception import WeightsError
from evaluation.run import EvaluationRun
from tests.cli.shell import Shell
from tests.evaluation.conftest import CAPTIONS, CLIP, blocks, evaluate, read_json


@pytest.mark.parametrize("size", [(128, 128), (300, 128)])
def test_pickscore_is_its_authors_lines(size: tuple[int, int]) -> None:
    """Processor, features, norms, and the logit scale times the product, as the model card has them."""
    model, tokenizer = CLIPModel.from_pretrained(CLIP).eval(), AutoTokenizer.from_pretrained(CLIP)
    seen, captions = blocks(4, size), list(CAPTIONS[:4])
    normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = CLIPImageProcessor(size={"shortest_edge": 128}, crop_size=128, resample=3, **normal)
    images = processor(images=[Image.fromarray(one) for one in seen], return_tensors="pt")
    texts = tokenizer(captions, padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.inference_mode():
        a, b = model.get_image_features(**images).pooler_output, model.get_text_features(**texts).pooler_output
        a, b = (one / torch.norm(one, dim=-1, keepdim=True) for one in (a, b))
        expected = (model.logit_scale.exp() * (b @ a.T)).diag()
    judge = judges.open_judge("pickscore", CLIP)
    found = judge.scale * (judge.network.see(seen) * judge.clip.read(captions)).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 if size[0] == size[1] else 0.3)  # other resizing


def test_hpsv2_sees_whole_pictures_between_black_borders() -> None:
    judge, usual = judges.open_judge("hpsv2", CLIP), Clip(CLIP)
    assert judge.scale == 100 and judge.network.name != usual.name  # their features are kept apart
    square, (wide,) = blocks(2, (200, 200)), blocks(1, (128, 64))
    torch.testing.assert_close(judge.network.see(square), usual.see(square))
    framed = np.pad(wide, ((32, 32), (0, 0), (0, 0)))
    torch.testing.assert_close(judge.network.see([wide]), usual.see([framed]))
    (tall,) = blocks(1, (256, 512))
    halved = np.asarray(Image.fromarray(tall).resize((64, 128), Image.Resampling.BICUBIC))
    torch.testing.assert_close(judge.network.see([tall]), usual.see([np.pad(halved, ((0, 0), (32, 32), (0, 0)))]))


@pytest.mark.long
def test_a_run_has_their_figures(runs: dict[str, Path], dino: Path, image_reward: Path, shell: Shell) -> None:
    given = {"fd-dinov2": dino, "cmmd": CLIP, "hpsv2": CLIP, "imagereward": image_reward}
    words = " ".join(f"--judge {figure}={folder}" for figure, folder in given.items())
    said = evaluate(shell, f"--out {runs['base']} --against {runs['three steps']} {words}")
    assert said.code == 0, said
    found = read_json(runs["base"] / "scores.json")
    held = found["against"]["three"]
    base, three = ([pixels.read(path) for path in EvaluationRun.read(runs[n]).files()] for n in ("base", "three steps"))
    network, clip = DinoV2(dino), Clip(CLIP)
    judge = judges.open_judge("imagereward", image_reward)
    expected = {
        "fd-dinov2": FrechetDistance(network.see(three))(network.see(base)),
        "cmmd": float(mmd.cmmd(clip.see(base), clip.see(three), torch.ones(1, len(base)))[0]),
        "hpsv2": 100 * float((clip.see(base) * clip.read(CAPTIONS)).sum(1).mean()),
        "imagereward": np.mean([judge.scorer.score(*pair) for pair in zip(base, CAPTIONS, strict=True)]),
    }
    scores = held["scores"] | found["scores"]
    assert {figure: scores[figure]["value"] for figure in expected} == pytest.approx(expected, rel=1e-4)
    assert set(held["changes"]) == {"emoji-clip-score", "hpsv2", "imagereward"}
    assert "fd-dinov2 is far too high" in " ".join(found["notes"])
    compared = f"evaluate compare {runs['base']} {runs['three steps']} --out r --lens {CLIP} {words}"
    assert shell(*compared.split()).code == 0
    entry = read_json(shell.folder / "r" / "report.json")["runs"][1]
    assert entry["changes"]["hpsv2"]["value"] == pytest.approx(-held["changes"]["hpsv2"]["value"], rel=1e-6)
    assert "<th>hpsv2</th>" in (shell.folder / "r" / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--judge hps=x", f"--judge: must be one of {', '.join(judges.figures())}, with =DIR, not 'hps=x'"),
        ("--judge cmmd", "not 'cmmd'"),
        ("--judge cmmd=a --judge cmmd=b", "--judge: names cmmd twice"),
        ("--judge pickscore=gone", "gone: is not a CLIP model"),
        ("--judge imagereward=gone", "gone: has no ImageReward.pt or ImageReward.safetensors"),
        ("--judge hpsv3=gone", "gone: has no HPSv3.safetensors"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_before_it_draws(words: str, told: str, shell: Shell) -> None:
    answer = evaluate(shell, f"--out run {words}")
    assert answer.code == 2 and told in answer.err, answer
    assert not (shell.folder / "run").exists()


def test_another_package_adds_a_figure_and_one_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "packages"
    metadata = folder / "bonfire-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "bonfire.py").write_text("def warmth(folder, device):\n    return folder, device\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bonfire\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{judges.GROUP}]\nwarmth = bonfire:warmth\nrain = bonfire:rain\ncmmd = bonfire:warmth\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    assert judges.figures()[: len(judges.JUDGES)] == [*judges.JUDGES] and judges.figures().count("cmmd") == 1
    assert {"warmth", "rain"} <= {*judges.figures()}
    assert judges.open_judge("warmth", tmp_path) == (tmp_path, "cpu")
    with pytest.raises(WeightsError, match=r"^rain \(bonfire:rain\) does not load \(AttributeError: "):
        judges.open_judge("rain", tmp_path)
    with pytest.raises(KeyError):
        judges.open_judge("hail", tmp_path)
