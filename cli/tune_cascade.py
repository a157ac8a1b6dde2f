"""`diptych tune --cascade`: finds the gate of a cascade of two models, and stores it beside the model's plans."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import CommandFailed, UsageError, check_range, create_cache_folder, model_errors, open_runtime
from cli.request import complete, read_request, size_of
from cli.scoring import looking, open_lens, scoring_errors
from contract.plan import OFF, to_field

if TYPE_CHECKING:
    from rich.console import Console

    from contract.image import ImageParameters
    from core.config import Settings
    from evaluation.captions import Caption
    from evaluation.cascading import Drawn, GateFigures, PlanFigures, Seconds
    from evaluation.scoring_networks import ScoringNetworks
    from evaluation.sources import LocalEngine
    from workers.build import Runtime

FULL, REDRAWN, DRAFT = "full", "redrawn", "draft"
_TIMED = 2  # times the engine's width: pictures of a turn
_TIMED_SCORES = 64


def add_options(tune: argparse.ArgumentParser) -> None:
    tune.add_argument("--cascade", metavar="DRAFT", help="find the gate of drafts by this model, in place of plans")
    tune.add_argument("--redraw", default=OFF, metavar="PLAN", help="of what a cascade redraws; default: off, the full")
    tune.add_argument(
        "--loss", type=float, default=0.3, metavar="PERCENT",
        help="that captions may score below the full plan's, with the whole interval; default: %(default)s",
    )  # fmt: skip
    tune.add_argument("--cascade-scorer", metavar="DIR", help="a CLIP's folder; default: emoji-clip")


def tune_cascade(options: argparse.Namespace, settings: Settings, target: Path, console: Console) -> int:
    """Draw, score and time; store the gate in `target`, and print the figures. Raises as the command does."""
    from evaluation import captions

    check_range(options, "loss", 0, 100)
    try:
        texts = captions.read(options.prompts, options.limit)
    except captions.PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error
    if len(texts) < 4:
        raise UsageError("--prompts: must be at least 4: half of them find the gate, the others check it")
    pair = {"model": settings.model_name, "models": options.cascade, "plan": ""}
    if settings.plans and not Path(settings.plans).expanduser().exists():
        pair["plans"] = ""  # it is made
    settings = settings.model_copy(update=pair)
    if settings.scorer_folder is None:
        raise UsageError("--cascade-scorer: must name a CLIP's folder for this model")
    with scoring_errors():
        lens = open_lens(options, settings)
        options.out.mkdir(parents=True, exist_ok=True)
        create_cache_folder(settings)
        try:
            with model_errors(), open_runtime(settings, console) as runtime:
                return _CascadeTuning(options, runtime, texts, lens, console).run(target)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command goes on") from None


class _CascadeTuning:
    """A search with an engine of both models."""

    def __init__(
        self,
        options: argparse.Namespace,
        runtime: Runtime,
        texts: list[Caption],
        lens: ScoringNetworks,
        console: Console,
    ) -> None:
        from contract.errors import Invalid
        from contract.image_request import draft_of
        from evaluation.sources import LocalEngine
        from workers.images.cards import image_card
        from workers.stages.cascade import CascadeStage

        if runtime.pool is None:
            raise UsageError("--cascade: must name another model than --model")
        self._options, self._runtime, self._texts, self._lens, self._console = options, runtime, texts, lens, console
        name, draft_name = runtime.pool.names
        draft, _ = runtime.pool.load(draft_name)
        gate = runtime.stage(CascadeStage).gate
        assert gate is not None, "there are two models and a scorer"
        self._gate = gate
        self._draft, self._model = draft.model, runtime.images.model
        offer = image_card(runtime.images).offer
        size = size_of(options, self._model.native)
        values = {"seed": 0, "size": f"{size[0]}x{size[1]}", **read_request(options, ["guidance_scale"])}
        full, redrawn = (
            complete({**values, "plan": plan}, offer, texts[0].text, OFF) for plan in (OFF, options.redraw)
        )
        try:
            job = draft_of(full, image_card(draft).offer)
        except Invalid as error:
            raise UsageError(f"--cascade: {error.message}") from error
        self._requests = {FULL: full, REDRAWN: redrawn, DRAFT: job.pictures()[0]}
        engines = {name: LocalEngine(runtime, name) for name in runtime.pool.names}
        self._sources = {FULL: engines[name], REDRAWN: engines[name], DRAFT: engines[draft_name]}

    def run(self, target: Path) -> int:
        from evaluation import cascading
        from pipeline import plans

        drawn = self._drawn()
        seconds = self._seconds()
        halves = [drawn.of(rows) for rows in _halves(len(self._texts))]
        figure, loss = self._lens.score, self._options.loss / 100
        resamples = self._options.resamples
        gate = cascading.choose(halves[0], figure, loss, resamples)
        chosen = cascading.figures(halves[1], gate, seconds, resamples)
        gates = [cascading.gate_of(drawn.draft_scores, share) for share in cascading.SHARES]
        frontier = [cascading.figures(drawn, each, seconds, resamples) for each in gates]
        alone = cascading.alone(drawn, seconds, resamples)
        if not chosen.kept:
            raise CommandFailed(f"no gate that keeps drafts loses at most {self._options.loss:g}%: none is stored")
        holds = chosen.ratios[figure][1] >= 1 - loss
        entry = self._entry(gate, seconds) | {
            "checked": _fields(chosen),
            "holds": holds,
            "alone": {name: _fields(each) for name, each in alone.items()},
            "frontier": [_fields(each) for each in frontier],
        }
        with model_errors():
            plans.write_gate(target, self._model.precision, self._draft.name, entry)
        print(_table(chosen, frontier, alone, figure))
        verdict = "holds" if holds else "does not hold, with the whole interval,"
        print(f"a loss of at most {self._options.loss:g}% {verdict} over the captions that check it")
        print(target, flush=True)
        return 0

    def _drawn(self) -> Drawn:
        """Draw what is missing, and score all of it."""
        import torch

        from evaluation import generate, references, scores
        from evaluation.cascading import Drawn
        from evaluation.run import EvaluationRun, RunWriter

        scored, runs = {}, {}
        names = [name for name in self._requests if name != REDRAWN or self._requests[name] != self._requests[FULL]]
        with generate.bars(self._console) as progress:
            for name in names:
                with RunWriter(self._options.out / name, self._run_settings(name), self._texts) as writer:
                    outcome = generate.draw(writer, self._sources[name], self._requests[name], 0, progress)
                if outcome.failed:
                    raise CommandFailed(f"{outcome.failed} pictures failed; the same command tries again")
                runs[name] = run = EvaluationRun.read(self._options.out / name)
                look = looking(progress)
                tick = lambda done, total, name=name, look=look: look(f"looking at {name}", done, total)  # noqa: E731
                features = references.run_features(run, self._lens, tick)
                scored[name] = scores.score_captions(run, self._lens, features)
        draft_scores = torch.tensor(self._gate_scores(runs[DRAFT]), dtype=torch.float64)
        return Drawn(scored[FULL], scored.get(REDRAWN, scored[FULL]), scored[DRAFT], draft_scores)

    def _gate_scores(self, run: Any) -> list[float]:
        """What the gate says of the drafts, as it does when it serves."""
        from PIL import Image

        from evaluation import pixels

        files = zip(run.files(), self._texts, strict=True)
        return self._gate.scores([(Image.fromarray(pixels.read(file)), text.text) for file, text in files])

    def _seconds(self) -> Seconds:
        """Device seconds of a picture of each kind. The gate scores on the CPU: on another device it takes none."""
        from PIL import Image

        from evaluation import cascading
        from evaluation.cascading import Seconds

        self._console.print("timing each model alone", highlight=False)
        on_cpu = self._model.device.type == "cpu"
        timed: list[tuple[LocalEngine, list[ImageParameters]]] = []
        for name, request in self._requests.items():
            source = self._sources[name]
            prompts = self._prompts(_TIMED * source.width)
            timed.append((source, [replace(request, prompt=prompt, seed=k) for k, prompt in enumerate(prompts)]))
        full, redrawn, draft = cascading.device_seconds(timed, on_cpu=on_cpu)
        blank = Image.new("RGB", self._requests[DRAFT].size)
        started = time.process_time()
        self._gate.scores([(blank, prompt) for prompt in self._prompts(_TIMED_SCORES)])
        score = (time.process_time() - started) / _TIMED_SCORES
        return Seconds(full, redrawn, draft, score if on_cpu else 0.0)

    def _prompts(self, count: int) -> list[str]:
        return [self._texts[k % len(self._texts)].text for k in range(count)]

    def _run_settings(self, name: str) -> dict[str, Any]:
        request = self._requests[name]
        model = self._draft if name == DRAFT else self._model
        return {
            "server": None, "model": model.name, "precision": model.precision, "prompts": self._options.prompts.name,
            "guidance_scale": request.guidance_scale, "seed_offset": 0, "size": "{}x{}".format(*request.size),
            "steps": request.steps, "scheduler": request.scheduler, "schedule_type": request.schedule_type,
            "guidance_interval": request.guidance_interval and [*request.guidance_interval],
            "deepcache": to_field(request.deepcache), "vae": request.vae,
            "guided_steps": None if request.guided_steps is None else [*request.guided_steps],
        }  # fmt: skip

    def _entry(self, gate: float, seconds: Seconds) -> dict[str, Any]:
        """The gate with how it was found."""
        scorer = self._runtime.settings.scorer_folder
        assert scorer is not None
        return {
            "gate": gate,
            "scorer": scorer.name,
            "scorer_digest": self._gate.digest,
            "draft": self._draft.digest,
            "weights": self._model.digest,
            "device": str(self._model.device),
            "prompts": len(self._texts),
            "lens": self._lens.name,
            "loss": self._options.loss,
            "redraw": self._options.redraw,
            "device_s": {name: round(value, 6) for name, value in seconds._asdict().items()},
        }


def _halves(count: int) -> tuple[Any, Any]:
    """The captions that find the gate, and those that check it: every other one."""
    import torch

    return torch.arange(0, count, 2), torch.arange(1, count, 2)


def _fields(figures: GateFigures | PlanFigures) -> dict[str, Any]:
    fields = figures._asdict()
    ratios = {name: [round(value, 5) for value in ratio] for name, ratio in figures.ratios.items()}
    random = {name: round(value, 5) for name, value in fields.get("random", {}).items()}
    numbers = {name: round(value, 4) for name, value in fields.items() if isinstance(value, float)}
    return {**numbers, "ratios": ratios, **({"random": random} if random else {})}


def _table(chosen: GateFigures, frontier: list[GateFigures], alone: Mapping[str, PlanFigures], score: str) -> str:
    from evaluation.compare import aligned

    names = [score, *(name for name in chosen.ratios if name != score)]

    def speed_and_scores(figures: GateFigures | PlanFigures) -> list[str]:
        return [f"{figures.speedup:.2f}×", *(_moved(*figures.ratios[name]) for name in names)]

    rows = [("", "gate", "kept", "random split", "full's", *names)]
    rows += [(f"{name} alone", "", "", "", *speed_and_scores(figures)) for name, figures in alone.items()]
    notes = [*("" for _ in frontier), "chosen, over the captions that check it"]
    for note, figures in zip(notes, [*frontier, chosen], strict=True):
        random = _moved(figures.random[score])
        rows.append((note, f"{figures.gate:.2f}", f"{figures.kept:.0%}", random, *speed_and_scores(figures)))
    return aligned(rows)


def _moved(value: float, *interval: float) -> str:
    bounds = " … ".join(f"{100 * (bound - 1):+.2f}" for bound in interval)
    return f"{100 * (value - 1):+.2f}%" + (f" ({bounds})" if interval else "")
