"""Prunes emoji-lm, and distils what is left from the whole model; writes `emoji-lm-KIND` under `--models`.

Kinds: `small` has fewer layers and channels, chosen by what they do on texts of the corpus (Minitron: Muralidharan et
al., 2024). `wanda` and `sparsegpt` have weights that are 2:4 sparse (`core.quant.sparse`), whose zeros stay. With
`--start` a kind is written as it is before training. Resumable, like all stages, and on another device.

    python -m lab.training.prune --data DATA --work WORK --models MODELS --kind small --minutes 20

WORK needs `tokens/lm`, from the stage `tokens` or `start --text`. `--judge NAME…` judges models under `--models`
instead, as `lab.training.judge` does emoji-lm.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from core.quant.gptq import round_weight
from core.quant.samples import Samples
from core.quant.sparse import mask, scores
from core.quant.statistics import Statistics
from lab.training import checkpoint, judge_text, lm, loop, tokens
from lab.training.run import TrainingRun, from_options, parser
from lab.training.shapes import TrainedLlamaShape

SMALL, SPARSE = "small", ("wanda", "sparsegpt")
TEXTS = 128  # of the corpus about single emoji, and as many about scenes, on which importance is measured
_ROWS = 4096  # that are kept of each layer's inputs
_RATE, _SPARSE_RATE = 1e-3, 5e-4
_COCO_SHARE = 1 / 16  # more than a fresh model reads: a teacher's distributions are not soon known by heart


def dense(run: TrainingRun) -> Any:
    """The exported emoji-lm, in fp32 on the run's device."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.models / "emoji-lm", dtype=torch.float32, local_files_only=True)
    return model.to(run.device).eval().requires_grad_(False)


def start(run: TrainingRun, kind: str) -> Any:
    """The pruned model before training: what `start.pt` of its stage has, and else made and written there.

    Sums on another device differ, and so would zeros.
    """
    model = dense(run)
    file, shape = run.folder(f"pruned-{kind}") / "start.pt", reduced(shape_of(model))
    state = checkpoint.load(file)
    if state is None:
        data = lm.corpus(run, TEXTS)
        texts = [ids[ids != model.config.pad_token_id].long().to(run.device) for ids in data.chats]
        if kind == SMALL:
            model = smaller(model, texts, shape)
        else:
            sparsify_(model, texts, kind)
        checkpoint.save(file, {"lm": model.state_dict()})
        return model
    if kind == SMALL:
        model = _shaped(model, shape)
    model.load_state_dict(state["lm"])
    return model


def shape_of(model: Any) -> TrainedLlamaShape:
    config = model.config
    return TrainedLlamaShape(
        config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
        config.intermediate_size,
    )  # fmt: skip


def reduced(shape: TrainedLlamaShape) -> TrainedLlamaShape:
    """The shape of `small`: of emoji-lm 59% of the parameters. Its few heads stay: channels matter less."""
    return dataclasses.replace(shape, layers=max(1, shape.layers * 2 // 3), inner=shape.inner * 7 // 11 // 8 * 8)


def _shaped(model: Any, shape: TrainedLlamaShape) -> Any:
    """An untrained model like `model`, of this shape."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.intermediate_size = shape.layers, shape.inner
    config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.kv_heads
    return type(model)(config).to(model.device)


@torch.no_grad()
def smaller(model: Any, texts: Sequence[Tensor], shape: TrainedLlamaShape) -> Any:
    """A model of this shape with the parts of `model` that matter most on `texts`.

    Layers go one by one, each time the one without which the loss is least; then key heads, each with its queries, by
    the norm of what they give, and channels by the mean magnitude of their activations.
    """
    model = copy.deepcopy(model)
    layers = model.model.layers
    labels = pad_sequence(list(texts), batch_first=True, padding_value=-100)
    while len(layers) > shape.layers:
        losses = []
        for skipped in range(len(layers)):
            model.model.layers = _numbered([layer for i, layer in enumerate(layers) if i != skipped])
            losses.append(float(model(labels.clamp_min(0), labels=labels, use_cache=False).loss))
        worst = losses.index(min(losses))
        layers = _numbered([layer for i, layer in enumerate(layers) if i != worst])
    model.model.layers = layers
    rows = _inputs(model, [f"model.layers.{i}.{part}" for i in range(shape.layers) for part in _ENDS], texts)
    config = model.config
    width, group = int(config.head_dim), config.num_attention_heads // config.num_key_value_heads
    for i, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        heads, channels = (rows[f"model.layers.{i}.{part}"].float() for part in _ENDS)
        of_heads = heads.view(len(heads), -1, group * width).norm(dim=-1).mean(0)
        kept = of_heads.topk(shape.kv_heads).indices.sort().values
        keys, queries = (_wide(kept, size) for size in (width, group * width))
        for name, places, axis in (
            ("q_proj", queries, 0),
            ("k_proj", keys, 0),
            ("v_proj", keys, 0),
            ("o_proj", queries, 1),
        ):
            _keep(attention, name, places, axis)
        kept = channels.abs().mean(0).topk(shape.inner).indices.sort().values
        for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
            _keep(mlp, name, kept, axis)
    result = _shaped(model, shape)
    result.load_state_dict(model.state_dict())
    return result


_ENDS = ("self_attn.o_proj", "mlp.down_proj")  # whose inputs are what heads and channels give


def _numbered(layers: Sequence[Any]) -> nn.ModuleList:
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    return nn.ModuleList(layers)


def _wide(places: Tensor, size: int) -> Tensor:
    return (places[:, None] * size + torch.arange(size, device=places.device)).flatten()


def _keep(module: Any, name: str, places: Tensor, axis: int) -> None:
    layer = getattr(module, name)
    layer.weight = nn.Parameter(layer.weight.index_select(axis, places))


def _inputs(model: Any, names: Sequence[str], texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Rows of the inputs of these layers on the texts."""
    statistics = Statistics("", samples=Samples(names, _ROWS))
    for text in texts:
        with statistics.observe(model, names, 0), torch.no_grad():
            model(text[None], use_cache=False)
    assert statistics.samples is not None
    return {name: rows.to(model.device) for name, rows in statistics.samples.rows.items()}


@torch.no_grad()
def sparsify_(model: Any, texts: Sequence[Tensor], method: str) -> None:
    """Prune the linear layers of the blocks to 2:4, in place."""
    layers = {name: layer for name, layer in model.model.named_modules() if isinstance(layer, nn.Linear)}
    rows = _inputs(model.model, [*layers], texts)
    for name, layer in layers.items():
        x = rows[name].float()
        if method == "sparsegpt":
            layer.weight.copy_(round_weight(layer.weight, None, x.T.double() @ x.double(), sparse=True))
        else:
            layer.weight.mul_(mask(scores(layer.weight, x if method == "wanda" else None)))


class Zeros:
    """The zeros of a sparse model, which training must not fill."""

    def __init__(self, model: Any) -> None:
        self._masks = [(m.weight, m.weight != 0) for m in model.model.modules() if isinstance(m, nn.Linear)]

    @torch.no_grad()
    def __call__(self) -> None:
        for weight, kept in self._masks:
            weight.mul_(kept)


def train(run: TrainingRun, kind: str) -> loop.StageOutcome:
    """Distil the pruned model from the whole one."""
    model = start(run, kind).requires_grad_(True).train()
    return lm.fit(
        run, f"pruned-{kind}", model, dense(run), rate=_SPARSE_RATE if kind in SPARSE else _RATE,
        coco_share=_COCO_SHARE, constrain=Zeros(model) if kind in SPARSE else lambda: None,
    )  # fmt: skip


def export(run: TrainingRun, kind: str, *, trained: bool = True) -> None:
    """Write the model, trained or as it is before, in fp16 with emoji-lm's tokenizer."""
    model = start(run, kind)
    zeros = Zeros(model)
    if trained:
        loop.load_average(f"pruned-{kind}", {"lm": model}, run)
    if kind in SPARSE:
        zeros()
    folder = run.models / f"emoji-lm-{kind}{'' if trained else '-start'}"
    model.half().save_pretrained(folder)
    tokens.lm_tokenizer(run).save_pretrained(folder)


def judge(run: TrainingRun, names: Sequence[str], expansions: int) -> None:
    """Write `judge/pruned.json` under `--work`: perplexities, and the shares of expansions that keep what was asked."""
    figures: dict[str, Any] = {}
    for name in names:
        figures[name] = judge_text.judge_lm(run, expansions, name)
        figures[name]["parameters"] = judge_text.CaptionModel(run, name).model.num_parameters()
        print(name, figures[name], flush=True)
    (run.folder("judge") / "pruned.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """`python -m lab.training.prune --kind KIND [--start] | --judge NAME …`."""
    options = parser(__doc__ or "")
    options.add_argument("--kind", choices=(SMALL, *SPARSE), default=SMALL)
    options.add_argument("--start", action="store_true", help="write the model as it is before training")
    options.add_argument("--judge", nargs="+", default=[], metavar="NAME", help="judge these models, and train none")
    options.add_argument("--expansions", type=int, default=300, help="chats of each kind that are judged")
    arguments = options.parse_args()
    run = from_options(arguments)
    if arguments.judge:
        judge(run, arguments.judge, arguments.expansions)
        return
    if not arguments.start:
        outcome = train(run, arguments.kind)
        print(outcome)
        if not outcome.done:
            return
    export(run, arguments.kind, trained=not arguments.start)


if __name__ == "__main__":
    main()
