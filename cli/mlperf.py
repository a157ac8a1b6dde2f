"""`diptych mlperf`: runs MLPerf's LoadGen against the engine, or a running service."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import drawing
from cli.arguments import (
    CommandFailed,
    Commands,
    UsageError,
    add_command,
    add_model,
    model_errors,
    open_texts,
    read_settings,
)
from cli.request import SHARED, destination
from cli.scoring import add_scoring, open_lens, score, scoring_errors, try_references

if TYPE_CHECKING:
    from rich.console import Console

    from contract.image import ImageParameters
    from core.config import Settings
    from evaluation.captions import Caption
    from evaluation.loadgen import LoadGenSettings, Result
    from evaluation.scoring_networks import ScoringNetworks

_ABOUT = """examples:
  diptych mlperf --scenario Offline --prompts captions_source.tsv --target-qps 2.4 --out offline
  diptych mlperf --scenario Server --prompts captions.tsv --latent off --target-qps 1.5 --duration 60 --queries 460 \\
      --out server
  diptych mlperf --scenario Offline --mode accuracy --prompts captions_source.tsv --against val2014.npz --out accuracy

LoadGen's own configuration says what an official run is; a run that is shorter says so. VALID needs 459 queries of
Server, 662 where one is late, and 64 of SingleStream. All pictures follow MLPerf's
protocol, as `diptych evaluate --protocol mlperf` does. The logs and the user.conf that LoadGen was given lie in DIR.

exit codes: 0 VALID, or accuracy scored; 1 INVALID, or pictures failed; 2 the input cannot be used, and is named
"""


def add(commands: Commands) -> None:
    mlperf = add_command(
        commands,
        "mlperf",
        "be measured by MLPerf's LoadGen",
        "LoadGen asks for pictures in one of MLPerf's scenarios, and says whether the run is VALID.",
        _ABOUT,
    )
    add_arguments(mlperf)


def add_arguments(mlperf: argparse.ArgumentParser) -> None:
    """Add the arguments of a test, and set what is fixed by its protocol."""
    mlperf.add_argument("--scenario", choices=("Offline", "Server", "SingleStream"), required=True)
    mlperf.add_argument(
        "--mode", choices=("performance", "accuracy"), default="performance", help="default: %(default)s"
    )
    mlperf.add_argument(
        "--prompts", type=Path, metavar="FILE", required=True, help="MLPerf's captions_source.tsv, or any"
    )
    mlperf.add_argument("--limit", type=int, metavar="N", help="only the first N captions")
    mlperf.add_argument("-o", "--out", type=Path, metavar="DIR", required=True, help="for LoadGen's logs: a new folder")
    mlperf.add_argument("--server", metavar="URL", help="of a running service that draws, instead of this process")
    mlperf.add_argument(
        "--target-qps", type=float, metavar="X", help="pictures a second that are expected or asked for"
    )
    mlperf.add_argument("--duration", type=float, metavar="S", help="at least so long; default: LoadGen's, 600 s")
    mlperf.add_argument("--queries", type=int, metavar="N", help="at least so many; default: LoadGen's")
    mlperf.add_argument("--user-conf", type=Path, metavar="FILE", help="more of LoadGen's configuration")
    mlperf.add_argument("--seed-offset", type=int, default=0, metavar="N", help="where there is no latent; default: 0")
    mlperf.add_argument("--latent", metavar="FILE", help="default: latents.npy beside FILE; off: seeds instead")
    mlperf.add_argument("--panel", choices=("image", "text"), default="image", help="default: %(default)s")
    mlperf.add_argument("--text-model", metavar="NAME", help="of the text panel; default: the embedded one")
    mlperf.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of an answer; default: %(default)s")
    add_model(mlperf)
    add_scoring(mlperf)
    mlperf.add_argument(
        "--against", type=Path, action="append", default=[], metavar="REF", help="of accuracy; as `evaluate` has it"
    )
    mlperf.set_defaults(
        run=run,
        compile=None,
        size=None,
        protocol="mlperf",
        plan=None,
        **dict.fromkeys(map(destination, SHARED)) | {"deterministic": False},
    )


def run(options: argparse.Namespace) -> int:
    """Run LoadGen's test, and say or score what it found."""
    from rich.console import Console

    from evaluation import captions
    from evaluation.loadgen import ACCURACY, LoadGenSettings

    console = Console(stderr=True)
    for name in ("target_qps", "duration", "queries", "limit", "max_tokens"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"--{name.replace('_', '-')}: must be greater than 0, not {value:g}")
    try:
        rows = captions.read(options.prompts, options.limit)
    except captions.PromptsError as error:
        raise UsageError(f"--prompts: {error}") from error
    settings = read_settings(options, compile=False).model_copy(update={"plan": ""})  # the test's is the protocol
    test = LoadGenSettings(
        options.scenario, options.mode, options.target_qps, options.duration, options.queries, options.user_conf
    )
    if options.panel == "text":
        with scoring_errors(), _loadgen_errors(), model_errors():
            _make(options.out)
            return _said(_written(test, options, settings, rows, console), test, options.out)
    drawing.follow_mlperf(options)
    draft = drawing.draft_of(options, settings, rows[0])
    with scoring_errors(), _loadgen_errors():
        lens = None
        if options.mode == ACCURACY:
            lens = open_lens(options, settings)
            try_references(options.against, lens)
        _make(options.out)
        with contextlib.ExitStack() as stack:
            result, draft, drawn_by = _driven(test, options, settings, draft, rows, stack, console)
        if lens is None:
            return _said(result, test, options.out)
        return _scored(options, settings, draft, rows, drawn_by, lens, console)


def _driven(
    test: LoadGenSettings,
    options: argparse.Namespace,
    settings: Settings,
    draft: ImageParameters,
    rows: Sequence[Caption],
    stack: contextlib.ExitStack,
    console: Console,
) -> tuple[Result, ImageParameters, dict[str, Any]]:
    """LoadGen's test of the engine or the service, after one warm-up image."""
    from evaluation import generate, loadgen
    from evaluation.loadgen_tasks import ImageTask

    latent, _ = drawing.open_latent(options)
    source, draft = drawing.open_source(options, settings, draft, rows, latent, stack, console)
    drafts = [
        replace(draft, prompt=caption.text, seed=generate.seed_of(caption, options.seed_offset)) for caption in rows
    ]
    warm = [source.submit(draft, lambda: None) for draft in drafts[: min(len(drafts), source.width // 2)]]
    pictures = [source.take(future.result()) for future in warm]
    with console.status(f"LoadGen: {test.scenario}, {test.mode}"):
        result = loadgen.run(test, ImageTask(source, drafts), options.out, partial(_warn, console))
    return result, draft, dict(generate.read_fingerprint(pictures[0].png))


def _written(
    test: LoadGenSettings, options: argparse.Namespace, settings: Settings, rows: Sequence[Caption], console: Console
) -> Result:
    """LoadGen's test of the text model: greedy answers to each caption as a chat's first message."""
    from evaluation import loadgen
    from evaluation.loadgen_tasks import RemoteTexts, TextTask
    from workers.text.handler import TextJobHandler

    prompts = [caption.text for caption in rows]
    name = settings.text_model_name
    if name is None:
        raise UsageError("--text-model: no text model is named and none is embedded")
    with contextlib.ExitStack() as stack:
        task: Any
        if options.server:
            short = Path(name).expanduser().resolve().name if Path(name).expanduser().is_dir() else name
            remote = RemoteTexts(options.server, short, prompts, max_tokens=options.max_tokens)
            task = stack.enter_context(contextlib.closing(remote))
        else:
            engine, runner = stack.enter_context(open_texts(settings, console, measure_s=1.0))
            task = TextTask(engine, TextJobHandler(runner), prompts, max_tokens=options.max_tokens)
        for future in [task.submit(index, lambda: None) for index in range(min(8, len(task)))]:
            future.result()  # warm-up, and checks that it works
        with console.status(f"LoadGen: {test.scenario}, {test.mode}"):
            return loadgen.run(test, task, options.out, partial(_warn, console))


def _warn(console: Console, text: str) -> None:
    console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _make(out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out: {out} is not empty; LoadGen's logs go into a folder of their own")
    out.mkdir(parents=True, exist_ok=True)


def _said(result: Result, test: LoadGenSettings, out: Path) -> int:
    from evaluation.run import write_json

    document = {
        "scenario": test.scenario, "valid": result.valid, "shortened": result.short, "summary": dict(result.summary),
    }  # fmt: skip
    write_json(out / "mlperf.json", document)
    if result.valid is None:
        print(out / "mlperf_log_accuracy.json", flush=True)
        return 0
    print(result.message)
    print(f"{test.scenario}: {'VALID' if result.valid else 'INVALID'}" + (" (shortened)" if result.short else ""))
    for reason in result.short:
        print(f"  shortened: {reason}")
    print(out / "mlperf_log_summary.txt", flush=True)
    return 0 if result.valid else 1


def _scored(
    options: argparse.Namespace,
    settings: Settings,
    draft: ImageParameters,
    rows: list[Caption],
    drawn_by: dict[str, Any],
    lens: ScoringNetworks,
    console: Console,
) -> int:
    """The images of the official accuracy log, as a run of their own, scored as any other."""
    from PIL import Image

    from evaluation import generate
    from evaluation.loadgen import read_accuracy
    from evaluation.run import RunWriter

    _, printed = drawing.open_latent(options)
    settings_used = drawing.asked(options, settings, draft) | {"latent": printed}
    with RunWriter(options.out / "run", settings_used, rows) as writer:
        writer.check_fingerprint(drawn_by)
        for index, picture in read_accuracy(options.out / "mlperf_log_accuracy.json", (draft.width, draft.height)):
            stream = io.BytesIO()
            Image.fromarray(picture).save(stream, "PNG")
            seed = generate.seed_of(rows[index], options.seed_offset)
            writer.add(rows[index], seed, f"{index:05d}.png", stream.getvalue(), session=0, seconds=0.0)
        if writer.run.missing:
            raise CommandFailed(f"LoadGen's accuracy log holds {len(writer.run.records)} of {len(rows)} pictures")
        return score(writer.run, options, lens, console)


@contextlib.contextmanager
def _loadgen_errors() -> Any:
    from evaluation.loadgen import LoadGenError

    try:
        yield
    except LoadGenError as error:
        raise CommandFailed(str(error)) from error
