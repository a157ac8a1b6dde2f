"""Holds the costs that CONTRIBUTING.md names: adds a stage, a field, a sampler and a figure to a copy of the tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.children import python_path

ROOT = Path(__file__).resolve().parents[1]
COSTS = dict(
    re.findall(r"^\| (an? [^|]+?) \| (\d+)\b", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.MULTILINE)
)


class Edit(NamedTuple):
    file: str
    before: str  # the text in the file that the new one goes before; "": a new file
    text: str


class Addition(NamedTuple):
    edits: tuple[Edit, ...]
    use: str  # code that fails unless the addition works everywhere


FIELD = Addition(
    (
        Edit(
            "contract/image.py",
            "    deterministic: Annotated[",
            "    grain: Annotated[int, Field(ge=0, le=9), 'a'] = 0\n",
        ),
    ),
    """
import json, cli
from api.app import create_app
from contract.bodies import check_bounds
from contract.errors import Invalid
from contract.image import ImageParameters
from core.config import Settings

image = ImageParameters("a hat", 1, 64, 64, grain=4)
assert ImageParameters.read(json.loads(json.dumps(image.to_record()))) == image and image.to_dict()["grain"] == 4
try:
    check_bounds(ImageParameters, {"grain": 10})
except Invalid as error:
    assert error.field == "grain"
paths = create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()["paths"]
for path in ("/v1/jobs", "/v1/images/generations", "/v1/images/edits"):
    assert '"grain"' in json.dumps(paths[path]), path
assert cli.parser().parse_args(["generate", "a hat", "--grain", "4"]).grain == 4
""",
)
SAMPLER = Addition(
    (
        Edit(
            "pipeline/sampling/samplers.py",
            '    "lcm": Sampler(',
            """\
    "dpm++1": Sampler(
        "scheduling_dpmsolver_multistep", "DPMSolverMultistepScheduler", ("dpm", "begin"), _DPM, {"solver_order": 1},
    ),
""",
        ),
        Edit("contract/image.py", 'lcm or tcd; default: its own"', "dpm++1, "),
    ),
    """
import torch
from diffusers import DPMSolverMultistepScheduler
from pipeline.families import sdxl
from pipeline.sampling import sigmas

assert "dpm++1" in sdxl.SCHEDULERS
config = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
scheduler = DPMSolverMultistepScheduler.from_config(config, solver_order=1)
scheduler.set_timesteps(6)
table = sigmas.table(config, "dpm++1", 6)
x = expected = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
x0 = torch.zeros_like(x)
for i, t in enumerate(scheduler.timesteps):
    row = table.coefficients[i : i + 1]
    x, x0 = sigmas.step(x, torch.tanh(sigmas.model_input(x, row)), x0, torch.zeros_like(x), row)
    output = torch.tanh(scheduler.scale_model_input(expected, t))
    expected = scheduler.step(output, t, expected, return_dict=False)[0]
torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-4)
""",
)
FIGURE = Addition(
    (
        Edit("evaluation/brightness.py", "", """
class Brightness:
    name, digest = "brightness", "none"

    def score(self, picture, caption, /):
        return float(picture.mean()) / 255
"""),
        Edit("evaluation/judges.py", "from evaluation.clip", "from evaluation.brightness import Brightness\n"),
        Edit("evaluation/judges.py", '    "hpsv3": _hpsv3,',
             '    "brightness": lambda folder, device: Judge("brightness", Kind.PAIR, Brightness()),\n'),
    ),
    """
from pathlib import Path
import numpy as np
from PIL import Image
from evaluation import features
from evaluation.judges import open_judge

scorer = open_judge("brightness", Path()).scorer
files = [Path(f"{level}.png") for level in (0, 255)]
for file, level in zip(files, (0, 255)):
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(file)
scores = features.pair_scores(files, ["a", "b"], "files", scorer, Path("store"), lambda *_: None)
assert scores.flatten().tolist() == [0, 1]
""",
)  # fmt: skip
STAGE = Addition(
    (
        Edit("workers/stages/label.py", "", """
from dataclasses import replace

from PIL.ImageDraw import Draw

from contract.errors import Invalid
from workers.stages.stage import JobStage


class LabelStage(JobStage):
    field = "label"

    def __init__(self, allowed):
        self.allowed = allowed

    @classmethod
    def open(cls, settings, device):
        return cls(settings.labels)

    def card(self, handler, handlers):
        return {"labels": self.allowed}

    def check(self, job, claim):
        if job.label and not self.allowed:
            raise Invalid("label", "is not offered by this worker")
        return job

    def after(self, job, outputs, stopped):
        return [self.labelled(output, job.label) for output in outputs]

    def labelled(self, output, text):
        image = output.value.image.copy()
        Draw(image).text((2, 2), text, fill="white")
        value = replace(output.value, image=image)
        return replace(output, value=value, facts={**output.facts, "label": text})
"""),
        Edit("workers/stages/registry.py", "from workers.stages.prov", "from workers.stages.label import LabelStage\n"),
        Edit("workers/stages/registry.py", "    ProvenanceStage,", "    LabelStage,\n"),
        Edit("contract/image.py", "    checker: Annotated[", "    label: Annotated[str, 'a'] = ''\n"),
        Edit("contract/image.py", "    content: CheckedContent", "    label: str | None = None\n"),
        Edit("contract/card.py", "    upscale_filters: Collection[str]", "    labels: bool | None = None\n"),
        Edit("contract/card.py", "    lora_aliases: dict", "    labels: StrictBool = False\n"),
        Edit("contract/card.py", '    if "checker" in request', """\
    if "label" in request and offer.labels is False:
        raise Invalid("label", "is not offered by this model's worker", UNSUPPORTED)
"""),
        Edit("core/config.py", "    checker_s: float", "    labels: bool = Field(default=False, description='')\n"),
        Edit("docs/operations.md", "| `DIPTYCH_CHECKER_S`", "| `DIPTYCH_LABELS` | off | a |\n"),
        Edit("docker-compose.yml", "  DIPTYCH_CHECKER_S:", "  DIPTYCH_LABELS:\n"),
    ),
    """
import io, json, tempfile
from pathlib import Path
from PIL import Image
from api.app import create_app
from api.presentation import facts
from contract.errors import Invalid
from contract.image_request import ImageRequest
from core.artifacts import Artifacts
from core.config import Settings
from tests.workers.desk import drawn, read, result_of, torch_settings
from tests.workers.stage import handler_of
from workers.artifact_writer import ArtifactWriter
from workers.build import build

folder, artifacts = Path(tempfile.mkdtemp()), Artifacts("memory://")
for allowed in (True, False):
    with build(torch_settings(cache_dir=folder, data_dir=folder, labels=allowed)) as runtime:
        offer = handler_of(runtime).card().offer
        if not allowed:
            try:
                request.complete(offer)
                read(runtime, job.to_dict())
            except Invalid as error:
                assert error.field == "label"
            continue
        request = ImageRequest(prompt="a hat", label="Hi", steps=1, seed=1)
        job = read(runtime, request.complete(offer).to_dict())
        pictures = drawn(runtime, handler_of(runtime).requests(job))
        (image,) = result_of(runtime, job, pictures, ArtifactWriter(artifacts))["images"]
        labelled = Image.open(io.BytesIO(artifacts.get(image["key"])))
        assert labelled.tobytes() != pictures[0].image.tobytes() and facts(image)["label"] == "Hi"
document = create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()
assert '"label"' in json.dumps(document["paths"]["/v1/images/generations"])
assert "label" in document["components"]["schemas"]["GeneratedImage"]["properties"]
""",
)  # fmt: skip
ADDITIONS = {
    "a stage of an image job": STAGE,
    "an API field": FIELD,
    "a sampler": SAMPLER,
    "a figure of an image and its caption": FIGURE,
}
RUN = """
import json, sys, traceback
errors = {}
for what, use in json.load(sys.stdin).items():
    try:
        exec(use, {})
    except Exception:
        errors[what] = traceback.format_exc()
print(json.dumps(errors))
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All additions in one copy of the tree, each used; the errors of those that fail."""
    tree = tmp_path_factory.mktemp("tree")
    edits = [edit for addition in ADDITIONS.values() for edit in addition.edits]
    packages = {edit.file.partition("/")[0] for edit in edits}
    for path in ROOT.iterdir():
        if path.name in packages:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tree / path.name)
        elif not path.name.startswith("."):
            (tree / path.name).symlink_to(path)
    for file, before, text in edits:
        source = (tree / file).read_text("utf-8") if before else ""
        assert not before or source.count(before) == 1, f"{file}: where is {before!r}?"
        (tree / file).write_text(source.replace(before, text + before) if before else text, "utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tree, env={**os.environ, "PYTHONPATH": python_path(tree)}, text=True,
        input=json.dumps({what: addition.use for what, addition in ADDITIONS.items()}), capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.parametrize("what", ADDITIONS)
def test_an_addition_takes_the_files_that_the_page_says(what: str, errors: dict[str, str]) -> None:
    assert what not in errors, errors[what]
    assert len({edit.file for edit in ADDITIONS[what].edits}) == int(COSTS[what])
