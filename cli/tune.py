"""`diptych tune`: finds a model's plans by drawing with it, and stores them beside it."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.arguments import (
    CommandFailed,
    Commands,
    UsageError,
    add_command,
    add_model,
    check_range,
    create_cache_folder,
    model_errors,
    open_runtime,
    read_settings,
    wrong_option,
)
from cli.request import FLAGS, add_request, complete, read_request, size_of
from cli.scoring import add_scoring, looking, open_lens, scoring_errors, try_references
from cli.tune_cascade import add_options, tune_cascade
from cli.tuned import read_gates, store, target_of
from contract.plan import DEPTHS, OFF

if TYPE_CHECKING:
    from rich.console import Console

    from contract.card import ImageCard
    from contract.image import ImageParameters
    from evaluation.captions import Caption
    from evaluation.references import ReferenceImages
    from evaluation.run import EvaluationRun
    from evaluation.scoring_networks import ScoringNetworks
    from evaluation.tuning import Candidate, Judged
    from workers.build import Runtime

_ABOUT = """A plan says how many steps there are, which of them run the whole network (DeepCache), which are guided, and
by which sampler. Plans are held against the full one: the model's default steps, all whole and guided. Names are given
to the fastest plans whose captions' score differs by at most so many per cent and whose pictures' mean PSNR to the full
plan's is at least so many dB: by default best=0.2:30,balanced=0.5:24,fast=2:18. Further limits may follow, such as
balanced=0.5:24:ssim=0.9:lpips=0.1:fid=5: the least mean SSIM; the most of lpips (with --lpips) and of distance, which
is 1 - cosine of the pictures' features; and by how many per cent fid and cmmd, to the pictures of --real, may be above
the full plan's. Requests name them as `plan`; "auto" is balanced. They are stored for the precision that drew, in
plans.json in the model's folder. DIR keeps all pictures, a report, and what a stopped search needs: the same command
goes on.

With --cascade it finds, in place of plans, the score from which drafts of another model are kept (a request's
`cascade`), for the least device time at which captions score no more than --loss below the full plan's, with the whole
interval. Every other caption finds the gate, the rest check it; all drafts, and all pictures of the plan of --redraw,
are drawn.

  diptych tune --prompts captions.txt -o tuned
  diptych serve --plan auto
  diptych tune --cascade emoji-xl-turbo --redraw balanced --prompts captions.txt -o cascade
  diptych serve --models emoji-xl,emoji-xl-turbo

exit codes: 0 all is found; 1 some pictures failed; 2 the input cannot be used, and is named
"""

_MEASURE_S = 60.0  # at most, until the costs of all kinds of steps are known


def add(commands: Commands) -> None:
    tune = add_command(
        commands,
        "tune",
        "find the fastest ways to draw with a model at little loss",
        "Draw prompts by many plans, and name the fastest that lose little.",
        _ABOUT,
    )
    tune.add_argument(
        "--prompts", type=Path, metavar="FILE", required=True, help="one a line, or a .tsv, .csv, .json or .jsonl"
    )
    tune.add_argument("-o", "--out", type=Path, metavar="DIR", required=True, help="for pictures and the report")
    tune.add_argument("--limit", type=int, default=128, metavar="N", help="prompts of finalists; default: %(default)s")
    tune.add_argument("--gates", metavar="NAME=PERCENT:DB[:FIGURE=LIMIT…],…", help="of named plans; see below")
    tune.add_argument("--real", type=Path, metavar="REF", help="what FID and CMMD are taken from: pictures or a run")
    tune.add_argument("--size", metavar="WxH", help="in pixels; default: the model's own")
    add_request(tune, ["guidance_scale"])
    tune.add_argument("--plans", metavar="FILE", help="to be written; default: plans.json in the model's folder")
    tune.add_argument("--shown", type=int, default=16, metavar="N", help="captions in the report's grid; default: 16")
    add_options(tune)
    add_model(tune, deepcache=False)
    add_scoring(tune)
    tune.set_defaults(run=_tune, compile=None, server=None)


def _tune(options: argparse.Namespace) -> int:
    from rich.console import Console

    from evaluation import captions, tuning

    console = Console(stderr=True)
    # Everything that can be rejected without a model is rejected before one is loaded.
    gates = read_gates(options)
    check_range(options, "limit", 2)
    settings = read_settings(options, compile=False)
    if options.cascade is not None:
        return tune_cascade(options, settings, target_of(settings), console)
    try:
        texts = tuning.shuffled(captions.read(options.prompts), options.limit)
    except captions.PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error
    if len(texts) < 2:
        raise UsageError("--prompts: must be at least 2")
    target = target_of(settings)
    settings = settings.model_copy(update={"plan": "", "plans": ""})
    with scoring_errors():
        lens = open_lens(options, settings)
        try_references([] if options.real is None else [options.real], lens)
        options.out.mkdir(parents=True, exist_ok=True)
        create_cache_folder(settings)
        try:
            with model_errors(), open_runtime(settings, console, measure_s=_MEASURE_S) as runtime:
                judged = _Tuning(options, runtime, texts, lens, console).run()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command goes on") from None
        store(options.out, judged, gates, lens, runtime.images.model, len(texts), target)
    return 0


def _missing(run: EvaluationRun, captions: int) -> list[Caption]:
    """Return those of the first `captions` captions that the run lacks."""
    return [caption for caption in run.missing if caption.index < captions]


class _Tuning:
    """A search with an engine that runs."""

    def __init__(
        self,
        options: argparse.Namespace,
        runtime: Runtime,
        texts: list[Caption],
        lens: ScoringNetworks,
        console: Console,
    ) -> None:
        from evaluation.sources import LocalEngine

        self._options, self._works, self._texts, self._lens, self._console = options, runtime, texts, lens, console
        self._source = LocalEngine(runtime)
        self._model = runtime.images.model
        self._draft = self._request()
        self._state = self._read_state()

    def run(self) -> list[Judged]:
        """The full plan and the finalists, judged."""
        from evaluation import generate, tuning

        draft = self._draft
        usual = replace(self._model.defaults, guidance_scale=draft.guidance_scale)
        every = tuning.candidates(usual, self._works.images.schedulers)
        every = [candidate for candidate in every if self._runs(candidate)]
        with generate.bars(self._console) as self._progress:
            card = self._card()
            for depth in set(DEPTHS) - card.costs.shallow_row_step_s.keys():
                self._tell(f"steps of the depth {depth} were not timed, and are not tried")
            search = tuning.Search(self._options.out, card, draft, len(self._texts), self._draw)
            finalists = [every[0], *search.finalists(every)]
            prompts = [caption.text for caption in self._texts]
            requests = {
                candidate.name: (candidate.request(draft), search.seconds(candidate)) for candidate in finalists
            }
            try:
                speeds = tuning.measure(
                    requests, self._source, prompts, self._state.setdefault("pairs", {}), self._keep_state,
                    self._tell,
                )  # fmt: skip
            except Exception as error:  # of one image
                raise CommandFailed(f"timing failed: {type(error).__name__}: {error}") from error
            return self._judge(finalists, speeds)

    def _request(self) -> ImageParameters:
        from contract.card import ImageOffer

        size = size_of(self._options, self._model.native)
        offer = ImageOffer([size], self._works.images.schedulers, size, defaults=self._model.defaults)
        values = {"seed": 0, **read_request(self._options, ["guidance_scale"])}
        return complete(values, offer, self._texts[0].text, OFF)

    def _runs(self, candidate: Candidate) -> bool:
        """Return whether the model can be asked for it. Raises `UsageError` for the full plan."""
        from contract.errors import Invalid
        from core.batching.request import Request
        from evaluation.tuning import FULL

        try:
            self._works.images.check(Request("check", "image", candidate.request(self._draft)))
        except Invalid as error:
            if candidate.name == FULL:
                raise wrong_option(error, FLAGS) from error
            return False
        return True

    def _settings(self, candidate: Candidate) -> dict[str, Any]:
        draft = self._draft
        return {
            "server": None, "model": self._model.name, "precision": self._model.precision,
            "prompts": self._options.prompts.name, "guidance_scale": draft.guidance_scale, "seed_offset": 0,
            "size": f"{draft.width}x{draft.height}", "steps": candidate.steps,
            "scheduler": candidate.scheduler or draft.scheduler, "schedule_type": candidate.schedule_type,
            "guidance_interval": candidate.interval and [*candidate.interval],
            "deepcache": candidate.fields()["deepcache"],
        }  # fmt: skip

    def _draw(self, plans: Sequence[Candidate], captions: int, title: str) -> list[Candidate]:
        """Draw the first captions by each plan, all in one stream. Returns those whose images are all there.

        Raises `CommandFailed` if the full plan's are not.
        """
        from evaluation import generate
        from evaluation.run import RunWriter

        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(
                    RunWriter(self._options.out / candidate.name, self._settings(candidate), self._texts)
                )
                for candidate in plans
            ]
            jobs = [
                generate.job_of(writer, caption, candidate.request(self._draft), 0)
                for candidate, writer in zip(plans, writers, strict=True)
                for caption in _missing(writer.run, captions)
            ]
            total = len(plans) * captions
            bar = self._progress.add_task(title, total=total, completed=total - len(jobs))
            log = generate.ProgressLog(self._console, f"pictures of {title}", 0)

            def ended() -> None:
                self._progress.advance(bar)
                log.update(int(self._progress.tasks[bar].completed), total)

            failed, _ = generate.draw_jobs(jobs, self._source, self._console, ended=ended)
            complete = {
                candidate.name: not _missing(writer.run, captions)
                for candidate, writer in zip(plans, writers, strict=True)
            }
        if not complete[plans[0].name]:
            raise CommandFailed(f"{failed} pictures failed; the same command tries again")
        for name, is_drawn in complete.items():
            if not is_drawn:
                self._tell(f"{name} is left out: pictures failed")
        return [candidate for candidate in plans if complete[candidate.name]]

    def _judge(self, finalists: Sequence[Candidate], speeds: dict[str, float]) -> list[Judged]:
        """Figures of the finalists, and the report."""
        from contract.tuned import BALANCED
        from evaluation import compare, report, tuning
        from evaluation.run import EvaluationRun, write_json

        runs = [EvaluationRun.read(self._options.out / candidate.name) for candidate in finalists]
        gates = compare.Gates(clip_change=tuning.GATES[BALANCED].score)
        look = looking(self._progress)
        real = self._reference(look)
        result = compare.runs(runs, self._lens, real, gates=gates, resamples=self._options.resamples, look=look)
        for note in result["notes"]:
            self._tell(f"note: {note}")
        for candidate, entry in zip(finalists, result["runs"], strict=True):
            entry["pictures_per_second"] = speeds[candidate.name]
        write_json(self._options.out / "report.json", result)
        page = report.page(result, runs, count=self._options.shown)
        (self._options.out / "report.html").write_text(page, "utf-8")
        return tuning.judge(finalists, result["runs"], self._lens)

    def _reference(self, look: Any) -> ReferenceImages | None:
        """Return what FID and CMMD are taken from, if it is given."""
        from evaluation import references

        path: Path | None = self._options.real
        if path is None:
            return None
        cache = self._options.out / "references"
        return references.look(path, self._lens, cache, partial(look, f"looking at {path.name}"))

    # -- what a stopped search leaves -------------------------------------------------------------------------------

    def _read_state(self) -> dict[str, Any]:
        from contract.card import read_card

        path = self._options.out / "tune.json"
        if not path.exists():
            return {}
        try:
            state: dict[str, Any] = json.loads(path.read_text("utf-8"))
            read_card(state["card"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UsageError(f"--out: {path} cannot be read ({error})") from error
        return state

    def _keep_state(self) -> None:
        from evaluation.run import write_json

        write_json(self._options.out / "tune.json", self._state)

    def _card(self) -> ImageCard:
        """The costs of the search's first start: with others, a search that goes on might choose other plans."""
        from contract.card import ImageCard, read_card, to_data
        from workers.images.cards import image_card

        if "card" not in self._state:
            self._state["card"] = to_data(image_card(self._works.images))
            self._keep_state()
        card = read_card(self._state["card"])
        assert isinstance(card, ImageCard)
        if card.device != str(self._model.device) or card.precision != self._model.precision:
            stored, current = f"{card.precision} on {card.device}", f"{self._model.precision} on {self._model.device}"
            raise UsageError(f"--out: {self._options.out} holds a search in {stored}, this is {current}")
        return card

    def _tell(self, line: str) -> None:
        self._console.print(line, style="dim", markup=False, highlight=False)
