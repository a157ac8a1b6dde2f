"""Compares Diptych with other runtimes that draw the same SDXL model on this CPU, each at its best, in turns.

    python -m venv build/openvino && build/openvino/bin/pip install -r lab/bench/openvino.txt
    python -m lab.bench.rivals --openvino build/openvino/bin/python

It measures the latency of one image at a time, and images per second and latency with 16 requests in flight. Runtimes
that draw one prompt, or one batch, at a time run in one process or in one for each core, whichever is faster. With
`--captions` each draws these too, and the gates of `diptych evaluate` hold its images against diffusers' in fp32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from core.config import Settings
from core.digests import digest_of
from core.threads import cores
from evaluation import captions
from evaluation.captions import Caption
from evaluation.run import RunWriter
from lab.bench.harness import provenance, record
from lab.bench.harness.processes import AnsweringProcess, ProcessGroup
from lab.bench.harness.turns import Contender, LeftOut, alternate
from lab.bench.harness.variants import BATCHES, BestVariant, Variant
from lab.bench.launcher import COMPILE_S, Launcher, best_stock, environment_of
from lab.bench.rungs import ENGINE, IN_FLIGHT, PROMPT, STOCK
from lab.bench.tables import TABLES
from pipeline.checkpoints.load import defaults_of
from pipeline.quantization.calibration import default_prompts


@dataclass(frozen=True)
class OpenVinoVariant(Variant):
    """A configuration of one of OpenVINO's pipelines: also the decoder's precision, and options of its CPU plugin."""

    int8_decoder: bool = False
    static: bool = False  # shapes of the batch; single images always have them
    pinned: bool = False  # threads to cores; those of several processes would share the first core
    hint: str = ""  # PERFORMANCE_HINT

    def side_by_side(self) -> Self:
        return replace(super().side_by_side(), pinned=False)


_SINGLE: tuple[dict[str, Any], ...] = ({"bf16": True}, {"int8_decoder": True}, {"pinned": True}, {"hint": "THROUGHPUT"})
_BATCHED: tuple[dict[str, Any], ...] = tuple({"batch": batch} for batch in BATCHES)
OPENVINO: dict[str, tuple[dict[str, Any], ...]] = {
    "openvino-genai": _SINGLE,
    "optimum-intel": (*_BATCHED, *_SINGLE, {"static": True}, *_BATCHED),
}
"""OpenVINO's pipelines, with the changes to try; the first draws one prompt at a time."""
BASE = "diffusers-fp32"
"""The run that the gates compare with: the stock pipeline in fp32."""
_DIPTYCH = ("+int8", "+deepcache")  # of as many steps as the others
_TURNS = 5
_ALONE = 4  # images, one after another, of each turn
_TOGETHER = 64  # images of each turn with `IN_FLIGHT` in flight
_VAE = 8  # pixels of a latent's side
_EXPORTED_S = 3600.0  # for a model's conversion, at its first run


@dataclass
class Rival:
    """A runtime's processes: for one request at a time, and for many in flight. Both may be the same."""

    alone: Contender
    together: ProcessGroup
    description: dict[str, Any]
    rates: list[float] = field(default_factory=list)  # images/s of each turn with many in flight
    latencies: list[float] = field(default_factory=list)  # median seconds of each turn with many in flight
    singles: list[float] = field(default_factory=list)  # median seconds of each turn's images alone

    def measure(self, name: str, turn: int) -> None:
        """Measure one turn, of images that no other turn has."""
        first = turn * (_ALONE + _TOGETHER)
        ends = [self.alone.draw(first + number, 1)[1] for number in range(_ALONE)]
        self.singles.append(statistics.median(end for [[end]] in ends))
        seconds, parts = self.together.draw(first + _ALONE, _TOGETHER)
        places = max(self.description.get("best", {}).get("batch", 1), IN_FLIGHT // len(parts))
        self.rates.append(_TOGETHER / seconds)
        self.latencies.append(statistics.median(late for part in parts for late in latencies(part, places)))
        record.progress(
            f"turn {turn + 1}: {name} {self.rates[-1]:.2f} images/s, {self.latencies[-1]:.2f} s each; "
            f"alone {self.singles[-1]:.3f} s"
        )


def latencies(ends: Sequence[float], places: int) -> list[float]:
    """Seconds from submission to end, if each end admits the next request to one of `places`."""
    ordered = sorted(ends)
    return [end - (ordered[i - places] if i >= places else 0.0) for i, end in enumerate(ordered)]


def run(
    settings: Settings, *, steps: int, results: Path | None, openvino: Path | None, names: Sequence[str],
    work: Path, compile_limit_s: float = COMPILE_S, turns: int = _TURNS, texts: Sequence[Caption] = (),
    real: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Measure the runtimes in turns, and store medians; `openvino` is the interpreter of OpenVINO's pipelines.

    Each draws the `texts` too, which are judged; FID is taken from `real`, or from the base. Raises `BenchError` for a
    model without guidance, of which the engine has twice as many requests in flight.
    """
    defaults = defaults_of(settings.model_name, settings.variant)
    if defaults.rows(defaults.guidance_scale) == 1:
        raise record.BenchError("--model: draws without guidance; the runtimes are compared with it")
    launcher = Launcher(settings, steps, None, environment_of(settings), compile_limit_s)
    left_out: dict[str, str] = {}
    rivals: dict[str, Rival] = {}
    with record.alone(), ExitStack() as stack:
        for name in names:
            record.progress(f"preparing {name}")
            try:
                with ExitStack() as starting:  # ends what was started of one that is left out
                    rivals[name] = _prepared(name, launcher, openvino, work, starting)
                    stack.push(starting.pop_all())
            except LeftOut as error:
                left_out[name] = str(error)
                record.progress(f"{name} is left out: {error}")
        if not rivals:
            raise record.BenchError(f"nothing can be measured here: {left_out}")
        alternate(rivals, turns, lambda name, rival, turn: rival.measure(name, turn))
        scored = _scored(rivals, launcher, texts, real, work / "runs") if texts else {}
    result = {
        "rivals": rows(rivals), "scored": scored, "left_out": left_out,
        "model": Path(settings.model_name).name, "steps": steps,
        "in_flight": IN_FLIGHT, "turns": turns, "images": _TOGETHER, "alone": _ALONE,
    }  # fmt: skip
    imported = set[str]().union(*(each.imported for rival in rivals.values() for each in (rival.alone, rival.together)))
    return record.publish(
        "rivals", result, results, artifacts=provenance.EMOJI_XL, imported=imported, table=TABLES["rivals-short"]
    )


def rows(rivals: Mapping[str, Rival]) -> list[dict[str, Any]]:
    """The runtimes as recorded: medians of the turns, and ratios to the best of those that are not Diptych's."""
    others = [rival for name, rival in rivals.items() if name not in ENGINE] or list(rivals.values())
    rate = max(statistics.median(rival.rates) for rival in others)
    single = min(statistics.median(rival.singles) for rival in others)
    return [
        {
            "name": name, "images_per_s": round(statistics.median(rival.rates), 4),
            "spread": [round(min(rival.rates), 4), round(max(rival.rates), 4)],
            "p50_s": round(statistics.median(rival.latencies), 4),
            "alone_p50_s": round(statistics.median(rival.singles), 4),
            "alone_spread_s": [round(min(rival.singles), 4), round(max(rival.singles), 4)],
            "ratio": round(statistics.median(rival.rates) / rate, 3),
            "alone_ratio": round(single / statistics.median(rival.singles), 3),
            **rival.description,
        }
        for name, rival in rivals.items()
    ]  # fmt: skip


# -- processes ---------------------------------------------------------------------------------------------------------


def _prepared(name: str, launcher: Launcher, openvino: Path | None, work: Path, stack: ExitStack) -> Rival:
    """The processes of a runtime, stopped. Raises `LeftOut`."""
    if name in ENGINE:
        process, description = launcher.start(name, stack)
        contender = _warmed([process], description)
        return Rival(contender, contender, {})
    if name == STOCK:
        (single, _, tried), (best, count, trials) = best_stock(launcher, alone=True), best_stock(launcher)
        tried += trials

        def start(variant: Variant, stack: ExitStack) -> AnsweringProcess:
            return launcher.start(STOCK, stack, variant)[0]
    else:
        command, request = _openvino_command(openvino), _openvino_request(name, launcher, work)
        with AnsweringProcess(request | {"export": True}, launcher.environment, command) as exporting:
            exporting.answer(_EXPORTED_S)

        def start(variant: Variant, stack: ExitStack) -> AnsweringProcess:
            process = stack.enter_context(
                AnsweringProcess(request | {"variant": asdict(variant)}, launcher.environment, command)
            )
            versions.update(process.answer()["versions"])
            return process

        versions: dict[str, str] = {}
        first = OpenVinoVariant(threads=launcher.settings.threads or cores())
        search, search_alone = BestVariant(start, OPENVINO[name], first), BestVariant(start, _SINGLE, first)
        best, count = search.find()
        (single, _), tried = search_alone.find(processes=False), [*search.trials, *search_alone.trials]
    description = {"best": asdict(best), "processes": count, "best_alone": asdict(single), "trials": tried}
    if name != STOCK:
        description["versions"] = versions
    together = _warmed([start(best, stack) for _ in range(count)], description)
    if (single, 1) == (best, count):
        return Rival(together, together, description)
    return Rival(_warmed([start(single, stack)], description), together, description)


def _warmed(processes: Sequence[AnsweringProcess], description: Mapping[str, Any]) -> ProcessGroup:
    contender = ProcessGroup(processes, description)
    contender.draw(10**5, 8 * len(processes))
    return contender


# -- quality -----------------------------------------------------------------------------------------------------------


def _scored(
    rivals: Mapping[str, Rival], launcher: Launcher, texts: Sequence[Caption], real: str, folder: Path
) -> dict[str, Any]:
    """Draw the captions with each runtime and by the base, and return scores and gates by runtime."""
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        base, _ = launcher.start(STOCK, stack, Variant(batch=BATCHES[0], threads=launcher.settings.threads or cores()))
        contenders = {BASE: ProcessGroup([base], {}), **{name: rival.together for name, rival in rivals.items()}}
        for name, contender in contenders.items():
            record.progress(f"{name} draws {len(texts)} captions")
            _draw_run(contender, texts, folder / name)
    words = ["compare", *(str(folder / name) for name in contenders), "--lens", "emoji-clip"]
    words += ["--out", str(folder / "compared"), *(["--real", real] if real else [])]
    command = [sys.executable, "-m", "cli", "evaluate", *words]
    subprocess.run(command, cwd=provenance.ROOT, env=launcher.environment, stdout=subprocess.DEVNULL, check=True)
    report = json.loads((folder / "compared" / "report.json").read_text("utf-8"))
    parts = ("scores", "ratios", "pairs", "gates")
    runs = {run["name"]: {part: run[part] for part in parts if part in run} for run in report["runs"]}
    return {"captions": len(texts), "lens": report["lens"], "runs": runs}


def _draw_run(contender: ProcessGroup, texts: Sequence[Caption], folder: Path) -> None:
    """Draw captions into a run's folder, each by its index as the seed: all runtimes begin from torch's noise of it."""
    drawn = folder.with_suffix(".drawn")
    drawn.mkdir(parents=True)
    contender.draw_prompts([text.text for text in texts], [text.index for text in texts], drawn)
    writer = RunWriter(folder, {}, list(texts))
    try:
        writer.check_fingerprint({"model": folder.name})
        for text in texts:
            file = drawn / f"{text.index:05d}.png"
            writer.add(text, text.index, file.name, file.read_bytes(), session=0, seconds=0.0)
    finally:
        writer.close()
    shutil.rmtree(drawn)


# -- OpenVINO's pipelines ----------------------------------------------------------------------------------------------


def _openvino_command(interpreter: Path | None) -> Sequence[str]:
    """The command of OpenVINO's processes. Raises `LeftOut` without an interpreter."""
    if interpreter is None:
        raise LeftOut("--openvino names no interpreter")
    if not interpreter.is_file():
        raise LeftOut(f"--openvino: there is no {interpreter}")
    return [str(interpreter.absolute()), str(provenance.ROOT / "lab" / "bench" / "openvino_pipelines.py")]


def _openvino_request(name: str, launcher: Launcher, work: Path) -> dict[str, Any]:
    """The request that describes one of OpenVINO's pipelines."""
    model = launcher.settings.model_name
    try:
        side = json.loads((Path(model) / "unet" / "config.json").read_text("utf-8"))["sample_size"]
    except (OSError, KeyError) as error:
        raise LeftOut(f"{model} is no folder of an SDXL model ({error})") from None
    guidance = defaults_of(model, launcher.settings.variant).guidance_scale
    digest = digest_of(Path(model), sorted((Path(model) / "unet").glob("*.safetensors")))
    return {
        "rung": name, "model": str(Path(model).resolve()), "steps": launcher.steps,
        "work": str((work / f"{Path(model).name}-{digest}-{launcher.steps}").resolve()),
        "size": _VAE * side, "guidance": guidance, "prompts": default_prompts(), "prompt": PROMPT,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench.rivals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = (STOCK, *OPENVINO, *_DIPTYCH)
    parser.add_argument(
        "--openvino", type=Path, metavar="PYTHON", help="interpreter with what lab/bench/openvino.txt has"
    )
    parser.add_argument("--only", metavar="NAME,…", help=f"of {', '.join(choices)}")
    parser.add_argument("--model", metavar="DIR", help="a folder in diffusers' format; default: models/emoji-xl")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=_TURNS, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--compile-limit", type=float, default=COMPILE_S, metavar="S", help="for torch.compile; default: %(default)g"
    )
    parser.add_argument("--work", type=Path, default=provenance.ROOT / "build" / "rivals", metavar="DIR",
                        help="keeps the converted model")  # fmt: skip
    parser.add_argument("--captions", type=Path, metavar="FILE", help="drawn by all and scored; default: none")
    parser.add_argument("--real", default="", metavar="REF", help="what FID is taken from; default: the base's images")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where the JSON goes; default: lab/bench/results")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else choices
    if unknown := [name for name in names if name not in choices]:
        parser.error(f"--only: there is no {', '.join(unknown)}; there are {', '.join(choices)}")
    if options.openvino is None and not options.only:
        parser.error("--openvino: whom it compares with; --only measures others")
    try:
        run(
            Settings(**({"model": options.model} if options.model else {})), steps=options.steps,
            results=options.results, openvino=options.openvino, names=names, work=options.work,
            compile_limit_s=options.compile_limit, turns=options.turns, real=options.real,
            texts=captions.read(options.captions) if options.captions else (),
        )  # fmt: skip
    except (record.BenchError, captions.PromptsError, subprocess.CalledProcessError) as error:
        record.progress(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
