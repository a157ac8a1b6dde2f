"""MLPerf's protocol: what it sets, its latent under every picture, and a verdict that is given only where it is due."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from evaluation import mlperf, pixels
from evaluation.mlperf import ProtocolError
from evaluation.run import EvaluationRun
from tests.cli.shell import Shell
from tests.evaluation.conftest import QUICK, table

OFFICIAL: dict[str, Any] = {
    "settings": {
        "steps": 20, "guidance_scale": 8.0, "scheduler": "euler", "negative_prompt": mlperf.NEGATIVE,
        "latent": "abc", "deepcache": "off",
    },
    "pictures": 5000, "side": 1024, "lens": "mlperf",
    "scores": {"clip-score": {"value": 31.75}},
    "against": {
        "val2014.npz": {"kind": "statistics", "scores": {"fid": {"value": 23.5}}},
        "other": {"kind": "run", "scores": {"fid": {"value": 1.0}}},
    },
}  # fmt: skip


def latent(path: Path, shape: tuple[int, ...] = (1, 4, 4, 4)) -> Path:
    np.save(path, np.random.default_rng(0).normal(0, 1, shape).astype(np.float32))
    return path


# mlcommons/inference, closed division of text_to_image: accuracy targets of Stable Diffusion XL.
RULES = {"fid": (23.01085758, 23.95007626), "clip-score": (31.68631873, 31.81331801)}


def scored(fid: float, clip: float) -> dict[str, Any]:
    """An official run with these scores."""
    statistics = {"kind": "statistics", "scores": {"fid": {"value": fid}}}
    return {**OFFICIAL, "scores": {"clip-score": {"value": clip}}, "against": {"val2014.npz": statistics}}


@given(st.floats(22.0, 26.0), st.floats(31.0, 32.5))
def test_a_verdict_is_whether_a_score_lies_in_its_window(fid: float, clip: float) -> None:
    found = mlperf.verdicts(scored(fid, clip))
    assert [(one.figure, one.value, one.within) for one in found] == [
        (name, value, RULES[name][0] <= value <= RULES[name][1]) for name, value in (("fid", fid), ("clip-score", clip))
    ]


@pytest.mark.parametrize("figure", RULES)
def test_windows_end_where_the_rules_say_to_the_last_digit(figure: str) -> None:
    low, high = RULES[figure]
    for value, within in ((low, True), (high, True), (low - 1e-8, False), (high + 1e-8, False)):
        scores = scored(**{"fid": 23.5, "clip": 31.75, figure.removesuffix("-score"): value})
        (verdict,) = (one for one in mlperf.verdicts(scores) if one.figure == figure)
        assert (verdict.low, verdict.high, verdict.within) == (low, high, within)
        (line,) = (line for line in mlperf.table(scores).splitlines() if line.startswith(figure))
        assert f"{low:.8f} … {high:.8f}" in line and ("OUTSIDE" in line) != within


def test_the_tests_own_statistics_go_before_those_of_a_run_in_either_order() -> None:
    statistics, run = OFFICIAL["against"].items()
    for order in ([statistics, run], [run, statistics]):
        fid, _ = mlperf.verdicts({**OFFICIAL, "against": dict(order)})
        assert (fid.value, fid.within) == (23.5, True)
    fid, _ = mlperf.verdicts({**OFFICIAL, "against": dict([run])})
    assert (fid.value, fid.within) == (1.0, False)
    assert [one.within for one in mlperf.verdicts({**OFFICIAL, "against": {}})] == [None, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pictures": 4999}, "4999 captions instead of 5000"),
        ({"side": 512}, "pictures of 512 pixels"),
        ({"lens": "emoji-clip"}, "seen through emoji-clip"),
        ({"stand_ins": ["val2014.npz"]}, "stand-ins for val2014.npz"),
        *(({"settings": OFFICIAL["settings"] | {name: value}}, words) for name, value, words in (
            ("steps", 30, "steps is 30"), ("steps", None, "steps is None"),
            ("guidance_scale", 7.5, "guidance_scale is 7.5"), ("scheduler", "dpm++2m", "scheduler is 'dpm++2m'"),
            ("negative_prompt", "", "negative_prompt is ''"), ("negative_prompt", None, "negative_prompt is None"),
            ("latent", None, "no fixed latent"), ("deepcache", "2", "DeepCache"), ("deepcache", "auto", "DeepCache"),
            ("guidance_interval", [0, 0.5], "guidance for a part"), ("guided_steps", [0, 1], "guidance for a part"),
            ("schedule_type", "karras", "schedule_type is given"), ("timesteps", [999, 0], "timesteps is given"),
            ("sigmas", [1.0, 0.0], "sigmas is given"), ("eta", 0.5, "eta is given"),
        )),
    ],
)  # fmt: skip
def test_what_is_not_the_test_gets_no_verdict(change: dict[str, Any], said: str) -> None:
    scores = OFFICIAL | change
    assert [one.within for one in mlperf.verdicts(scores)] == [None, None]
    assert said in mlperf.table(scores)


def test_the_protocol_is_followed_from_one_latent(shell: Shell) -> None:
    latent(shell.folder / "latents.npy")
    prompts = table(shell.folder, ("a fox", "a fox", "a hen"))
    words = ["evaluate", *f"--prompts {prompts} --protocol mlperf".split(), *QUICK[:2], *QUICK[4:], "--out"]
    said = shell(*words, "run")
    assert said.code == 0, said.err
    assert "not MLPerf's test: 3 captions instead of 5000; seen through emoji-clip" in said.out
    run = EvaluationRun.read(shell.folder / "run")
    first, second, third = (pixels.read(path).astype(int) for path in run.files())
    assert abs(first - second).max() <= 1 < abs(first - third).max()  # one latent, whatever the seed
    with Image.open(run.files()[0]) as image:
        drawn = json.loads(image.info["diptych"])
        assert len(json.loads(image.info["fingerprint"])["latent"]) == 12
    assert (drawn["steps"], drawn["guidance_scale"], drawn["scheduler"]) == (20, 8.0, "euler")
    assert drawn["negative_prompt"] == mlperf.NEGATIVE
    assert "--guidance: MLPerf's protocol has 8.0" in shell(*words, "x", "--guidance", "5").err
    assert "--latent: a service begins" in shell(*words, "x", "--server", "http://127.0.0.1:1").err
    latent(shell.folder / "latents.npy", (1, 4, 128, 128))
    said = shell(*words, "y")
    assert said.code == 2 and "is [1, 4, 128, 128], images of random:tiny begin from [1, 4, 4, 4]" in said.err


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"text", "cannot be read as .npy"),
        (np.zeros((1, 4, 4, 4)), r"must be one latent, float32 .* not float64 \[1, 4, 4, 4\]"),
        (np.zeros((2, 4, 4, 4), np.float32), r"must be one latent, .* not float32 \[2, 4, 4, 4\]"),
        (np.zeros((1, 4, 4), np.float32), r"must be one latent, .* not float32 \[1, 4, 4\]"),
        ({"latent": np.zeros((1, 4, 4, 4), np.float32)}, "must be one latent, .* not an archive"),
        (np.full((1, 4, 4, 4), np.nan, np.float32), "holds NaN"),
        (np.zeros((1, 4, 8, 8), np.float32), r"begin from \[1, 4, 4, 4\]"),
    ],
)
def test_what_is_no_latent_is_refused(data: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "l.npy"
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif isinstance(data, dict):
        with path.open("wb") as stream:  # given a name, numpy would change how it ends
            np.savez(stream, **data)
    else:
        np.save(path, data)
    with pytest.raises(ProtocolError, match=said):
        mlperf.read_latent(path, [1, 4, 4, 4])
    with pytest.raises(ProtocolError, match="cannot be read"):
        mlperf.read_latent(tmp_path / "gone", [1, 4, 4, 4])


def test_a_latent_of_any_shape_is_read_where_no_model_asks_for_one(tmp_path: Path) -> None:
    written = np.load(latent(tmp_path / "l.npy", (1, 3, 5, 2)))
    found, digest = mlperf.read_latent(tmp_path / "l.npy")
    assert np.array_equal(found.numpy(), written)
    assert mlperf.read_latent(tmp_path / "l.npy", [1, 3, 5, 2])[1] == digest, "and where one asks for that shape"
    assert digest == hashlib.sha256((tmp_path / "l.npy").read_bytes()).hexdigest()
