"""LPIPS: as torchmetrics computes it over the same weights, and what refuses other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evaluation.clip import EMBEDDED
from evaluation.inception import WeightsError
from evaluation.lpips import AlexNet, ClipLayers, Lpips
from tests.evaluation.test_pairs import two


@pytest.fixture(scope="module")
def alexnet_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of torchvision's layout with seeded random numbers, scaled so that no layer dies."""
    draw = torch.Generator().manual_seed(0)
    weights = {
        f"features.{name}": torch.randn(value.shape, generator=draw) * (2 / max(1, value[0].numel())) ** 0.5
        for name, value in AlexNet().state_dict().items()
    }
    path = tmp_path_factory.mktemp("weights") / "alexnet.pth"
    torch.save(weights | {"classifier.6.bias": torch.zeros(1000)}, path)
    return path


@pytest.mark.parametrize("side", [(64, 64), (40, 96), (128, 128)])
@pytest.mark.parametrize("amount", [3.0, 60.0])
def test_it_is_torchmetrics(
    side: tuple[int, int], amount: float, alexnet_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the network of the file where torchmetrics takes torchvision's, which the tests do without."""
    from torchmetrics.functional.image import lpips as theirs

    def network(name: str, pretrained: bool = False) -> torch.nn.Sequential:
        assert name == "alexnet"
        made = AlexNet()
        found = torch.load(alexnet_file, weights_only=True)
        made.load_state_dict({key: found[f"features.{key}"] for key in made.state_dict()})
        return made

    monkeypatch.setattr(theirs, "_get_tv_model_features", network)
    reference: Any = theirs._LPIPS(pretrained=True, net="alex").eval()
    a, b = two(side, amount)
    x, y = (torch.tensor(one).permute(2, 0, 1)[None].float() / 127.5 - 1 for one in (a, b))
    expected = float(reference(x, y))
    assert expected > 1e-4 and Lpips(alexnet_file)(a, b) == pytest.approx(expected, rel=1e-4)


def test_equal_images_are_zero_and_small_ones_refused(alexnet_file: Path) -> None:
    a, b = two((32, 32), 20.0)
    measure = Lpips(alexnet_file)
    assert measure(a, a) == 0 < measure(a, b) == pytest.approx(measure(b, a), rel=1e-6)
    with pytest.raises(ValueError, match="at least 31"):
        measure(a[:30], b[:30])
    assert np.isfinite(measure(a[:31, :31], b[:31, :31]))


def test_other_files_are_refused_by_name(alexnet_file: Path, tmp_path: Path) -> None:
    found = torch.load(alexnet_file, weights_only=True)
    del found["features.3.bias"]
    torch.save(found, tmp_path / "part.pth")
    torch.save([1], tmp_path / "list.pth")
    for name, told in (("part.pth", "is not torchvision's AlexNet"), ("list.pth", "no weights by name"), ("x", "read")):
        with pytest.raises(WeightsError, match=f"{name}: .*{told}"):
            Lpips(tmp_path / name)


def test_over_a_clips_layers_it_is_the_papers_formula_without_learned_weights() -> None:
    from transformers import CLIPModel

    shapes: list[tuple[tuple[int, int], float]] = [((128, 128), 3.0), ((128, 128), 60.0), ((192, 144), 20.0)]
    pairs = [two(side, amount) for side, amount in shapes]
    measure = ClipLayers()
    found = measure.between([a for a, _ in pairs], [b for _, b in pairs])
    model: Any = CLIPModel.from_pretrained(EMBEDDED, dtype=torch.float32)
    for (a, b), value in zip(pairs[:2], found[:2], strict=True):
        x, y = (torch.tensor(one).permute(2, 0, 1)[None].float() / 127.5 - 1 for one in (a, b))
        with torch.no_grad():
            seen = [model.vision_model(pixel_values=one, output_hidden_states=True).hidden_states for one in (x, y)]
        blocks = zip(seen[0][1:], seen[1][1:], strict=True)
        cosines = [torch.cosine_similarity(one[:, 1:].double(), other[:, 1:].double(), dim=-1) for one, other in blocks]
        assert float(value) == pytest.approx(sum(float((2 - 2 * each).mean()) for each in cosines), rel=1e-3)
    assert measure.figure == "emoji-clip-layers" and 0 < found[0] < found[1]
    assert measure.between(pairs[0], pairs[0]).tolist() == [0, 0]
    assert measure.between([], []).shape == (0,)
