"""`diptych tune` on a tiny model: plans beside it, a report, a search that was killed goes on, and what is refused."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from contract.plan import AUTO
from evaluation import tuning
from evaluation.tuning import FULL, Candidate
from pipeline import plans
from pipeline.checkpoints import tiny
from tests.children import ROOT
from tests.cli.shell import Shell, made_with
from tests.evaluation.test_lpips import alexnet_file as alexnet_file

FEW = [
    Candidate(FULL, 20), Candidate("20-2resnet", 20, AUTO), Candidate("10", 10),
    Candidate("10-0.5", 10, None, (0.0, 0.5)), Candidate("7-dpm++2m", 7, None, None, "dpm++2m", "karras"),
]  # fmt: skip
ROUNDS = ((2, 0.75), (4, 0.75))
TIMED = (0.25, 0.25)  # of what keeps the engine full
WORDS = shlex.split("--model random:tiny --precision fp32 --lens emoji-clip --limit 6 --plans plans.json -o tuned")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda *_: FEW)
    monkeypatch.setattr(tuning, "_ROUNDS", ROUNDS)
    monkeypatch.setattr(tuning, "_TIMED", TIMED)


@pytest.fixture
def prompts(shell: Shell) -> str:
    return shell.save("prompts.txt", "".join(f"a cat number {index}\n" for index in range(9)))


def front(folder: Path) -> Any:
    return json.loads((folder / "plans.json").read_text())["tuned"]["fp32"]


def nearly(found: Any, rel: float = 1e-4) -> Any:
    """A front to compare: a picture drawn again, in other company, may round another way.

    Of a random model's pictures the scores are near 0, and so their ratios are to fewer digits.
    """
    if isinstance(found, dict):
        return {name: nearly(value, 1e-2 if name == "score_ratio" else rel) for name, value in found.items()}
    if isinstance(found, list):
        return [nearly(value, rel) for value in found]
    return pytest.approx(found, rel=rel, abs=1e-4) if isinstance(found, float) else found


@pytest.mark.long
@pytest.mark.usefixtures("few")
def test_plans_are_found_named_and_used(shell: Shell, prompts: str) -> None:
    said = shell.done("tune", *WORDS, "--prompts", prompts, "--gates", "fast=1000:1,best=0:99")
    lines = said.out.splitlines()
    assert lines[-2:] == ["tuned/report.html", "plans.json"] and lines[0].split() == [
        "plan", "names", "images/s", "full's", "PSNR", "SSIM", "emoji-clip-distance", "score",
    ]  # fmt: skip
    found = front(shell.folder)
    assert found["lens"] == "emoji-clip" and found["gates"]["best"] == {"score": 0, "psnr": 99, "others": {}}
    assert found["front"][-1]["ssim"] == 1 and found["front"][-1]["distance"] == 0
    assert all(0 < one["ssim"] < 1 and one["distance"] > 0 for one in found["front"][:-1])
    assert found["prompts"] == 6 and found["plans"]["best"] == {"steps": 20, "deepcache": "off"}
    speeds = [one["images_per_s"] for one in found["front"]]
    assert speeds == sorted(speeds, reverse=True) and found["front"][-1]["psnr"] == 100
    named = found["plans"]["fast"]
    assert named != found["plans"]["best"] and named in [one["fields"] for one in found["front"]]
    page = (shell.folder / "tuned" / "report.html").read_text()
    assert "Speed against quality" in page and page.count("data:image/webp") > 6
    assert plans.read_plans(shell.folder / "plans.json", "fp32").keys() == {"fast", "best"}
    words = shlex.split("generate x --model random:tiny --precision fp32 -o out --plans plans.json --seed 1")
    shell.done(*words, "--plan", "fast")
    made = made_with(shell.pictures()[0])
    assert made["steps"] == named["steps"] and made.get("guidance_interval") == named.get("guidance_interval")
    assert "plan: must be one of off, auto, fast, best" in shell.refusal(*words, "--plan", "balanced")


@pytest.mark.long
@pytest.mark.usefixtures("few")
def test_the_same_plans_are_found_by_a_search_that_goes_on(
    shell: Shell, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("tune", *WORDS, "--prompts", prompts, "--gates", "fast=1000:1,best=0:99")
    state = shell.folder / "tuned" / "tune.json"
    with monkeypatch.context() as patch:
        patch.setattr("cli.tune._Tuning._draw", interrupted)
        assert shell(*words).code == 130
    costs = json.loads(state.read_text())["card"]
    shell.done(*words)
    whole = front(shell.folder)
    (shell.folder / "plans.json").unlink()
    # What a kill leaves: pictures without a record, and half a line. Which plans are drawn beside these two depends on
    # how fast each was.
    logs = {log.parent.name: log for log in (shell.folder / "tuned").glob("*/pictures.jsonl")}
    assert logs.keys() >= {"10", FULL}
    for log in logs.values():
        log.write_bytes(log.read_bytes()[:-40])
    shutil.rmtree(logs["10"].parent)
    shell.done(*words)
    again = front(shell.folder)
    assert again == nearly(whole) and json.loads(state.read_text())["card"] == costs
    # Nothing is drawn again, or timed, where everything is there.
    before = {path: path.stat().st_mtime_ns for path in (shell.folder / "tuned").rglob("*.png")}
    shell.done(*words)
    assert front(shell.folder) == again
    assert {path: path.stat().st_mtime_ns for path in (shell.folder / "tuned").rglob("*.png")} == before


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.long
@pytest.mark.usefixtures("few")
def test_gates_of_other_figures_with_real_pictures_and_lpips(shell: Shell, prompts: str, alexnet_file: Path) -> None:
    """The same finalists by other limits: those that every plan passes, and those that none does."""
    shell.done("tune", *WORDS, "--prompts", prompts, "--gates", "fast=1000:1")
    fastest = front(shell.folder)["plans"]["fast"]
    real = shell.folder / "tuned" / "10" / "pictures"
    words = ("tune", *WORDS, "--prompts", prompts, "--real", str(real), "--lpips", str(alexnet_file), "--gates")
    wide, narrow = "ssim=-1:distance=2:lpips=9:fid=1e9:cmmd=1e9", ("ssim=1", "distance=0", "lpips=0", "fid=-99.99")
    gates = [f"fast=1000:1:{wide}", *(f"no{k}=1000:1:{limit}" for k, limit in enumerate(narrow))]
    said = shell.done(*words, ",".join(gates))
    assert said.out.splitlines()[0].split()[5:] == [
        "SSIM", "LPIPS", "emoji-clip-distance", "emoji-clip-fid", "emoji-clip-cmmd", "score",
    ]  # fmt: skip
    found = front(shell.folder)
    full = {"steps": 20, "deepcache": "off"}
    assert found["plans"]["fast"] == fastest != full
    assert all(found["plans"][f"no{k}"] == full for k in range(3))
    own = next((one for one in found["front"] if one["name"] == "10"), None)
    assert own is None or found["plans"]["no3"] == own["fields"], "its own pictures are the real ones"
    assert all(one["lpips"] > 0 and len(one["fid_ratio"]) == 3 for one in found["front"][:-1])
    assert found["front"][-1]["cmmd_ratio"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--gates fast", "--gates: 'fast': must look like balanced=0.5:24"),
        ("--gates auto=1:2", "--gates: 'auto=1:2': plans.auto: is a word of requests"),
        ("--gates fast=1:2:much=3", "much must be one of ssim, distance, lpips, fid, cmmd"),
        ("--gates fast=1:2:ssim=inf", "--gates: 'fast=1:2:ssim=inf': must look like"),
        ("--gates fast=1:2:lpips=3", "lpips needs --lpips"),
        ("--real gone", "gone: is neither a run"),
        ("--prompts gone.txt", "--prompts: "),
        ("--size 7x7", "--size: 7x7 is not offered"),
        ("--plans ''", "--plans: must be given: random:tiny has no folder"),
    ],
)
def test_what_cannot_be_used_is_named(shell: Shell, prompts: str, words: str, told: str) -> None:
    assert told in shell.refusal("tune", *WORDS, "--prompts", prompts, *shlex.split(words))
    assert not list(shell.folder.rglob("*.png"))


@pytest.mark.usefixtures("few")
def test_a_folder_of_something_else_is_refused(shell: Shell, prompts: str) -> None:
    (shell.folder / "tuned" / FULL).mkdir(parents=True)
    (shell.folder / "tuned" / FULL / "mine.txt").write_text("x")
    assert "contains something other than a run" in shell.refusal("tune", *WORDS, "--prompts", prompts)
    (shell.folder / "tuned" / "tune.json").write_text("{")
    assert "tune.json cannot be read" in shell("tune", *WORDS, "--prompts", prompts).err


CASCADE = shlex.split("--precision fp32 --lens emoji-clip --resamples 10 --threads 1 --limit 6 -o cascade")


@pytest.fixture
def pair(shell: Shell) -> list[str]:
    """Options for two models: the second may draw first."""
    for seed, name in enumerate(("painter", "sketcher")):
        tiny.save(shell.folder / name, tiny.SHAPES[tiny.TINY], seed)
    return ["--model", "painter", "--cascade", "sketcher", "--cascade-scorer", str(ROOT / "models" / "emoji-clip")]


@pytest.mark.long
def test_a_gate_is_found_stored_and_read(
    shell: Shell, prompts: str, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_MAX_REQUESTS", "2")
    plans.write(shell.folder / "painter" / plans.FILE, "fp32", {"plans": {"quick": {"steps": 3}}})
    words = [*CASCADE, *pair, "--redraw", "quick", "--prompts", prompts]
    said = shell.done("tune", *words, "--loss", "100")
    assert said.out.splitlines()[0].split()[:3] == ["gate", "kept", "random"]
    assert said.out.splitlines()[-1] == f"painter/{plans.FILE}"
    tuned = front(shell.folder / "painter")
    found = tuned["cascades"]["sketcher"]
    assert tuned["plans"] == {"quick": {"steps": 3}}, "plans stay"
    kept = plans.TunedGate(found["gate"], found["draft"], found["scorer_digest"])
    assert plans.read_gates(shell.folder / "painter" / plans.FILE, "fp32") == {"sketcher": kept}
    assert isinstance(found["holds"], bool) and "over the captions that check it" in said.out
    assert found["redraw"] == "quick" and found["scorer"] == "emoji-clip" and found["prompts"] == 6
    assert len(found["frontier"]) == 11 and found["frontier"][0]["kept"] == 0 and found["frontier"][-1]["kept"] == 1
    assert found["alone"].keys() == {"redrawn", "draft"} and min(found["device_s"].values()) > 0
    steps = {name: json.loads((shell.folder / "cascade" / name / "run.json").read_text())["settings"]["steps"]
             for name in ("full", "redrawn", "draft")}  # fmt: skip
    assert steps == {"full": 20, "redrawn": 3, "draft": 20}
    # Plans that are tuned later leave the gate.
    plans.write(shell.folder / "painter" / plans.FILE, "fp32", {"plans": {"quick": {"steps": 2}}})
    assert front(shell.folder / "painter")["cascades"] == tuned["cascades"]


@pytest.mark.quick(0, 1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cascade painter", "--cascade: must name another model than --model"),
        ("--redraw quick", "must be one of off, auto"),
        ("--loss -1", "--loss: must be"),
        ("--limit 3", "--prompts: must be at least 4"),
    ],
)
def test_a_pair_that_cannot_be_tuned_is_named(
    shell: Shell, prompts: str, pair: list[str], words: str, said: str
) -> None:
    assert said in shell.refusal("tune", *CASCADE, *pair, "--prompts", prompts, *words.split())
