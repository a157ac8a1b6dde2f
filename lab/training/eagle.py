"""Stage `eagle`: trains an EAGLE-3 head for the language model (`llm.drafts.eagle`) on what the model writes.

As published, with training-time test: the head is unrolled over several steps, each of which reads what the step before
returned in place of the target's states, and sees these at its own positions alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from lab.training import loop
from lab.training.draft import answers, target
from lab.training.run import TrainingRun, command
from llm.drafts.eagle import ARCHITECTURES, LAYER_IDS, EagleNetwork, unrolled

STEPS = 5  # of the unrolled head
WORDS = 2048  # of the reduced vocabulary: the most frequent ones
SOURCES = (1, 3, 5)
_FADE = 0.8  # of a step's weight relative to that of the step before


def build(run: TrainingRun) -> EagleNetwork:
    """A fresh head, on the run's device."""
    from transformers import LlamaConfig

    shape, layers = run.shapes.lm, run.shapes.lm.layers
    torch.manual_seed(run.seed)
    config = LlamaConfig(**{**run.shapes.llama(shape, run.shapes.lm_vocab, 1, 5, 0), "num_hidden_layers": 1})
    config.draft_vocab_size = min(WORDS, run.shapes.lm_vocab)
    config._attn_implementation = "sdpa"
    return EagleNetwork(config, tuple(min(source, layers - 1) for source in SOURCES)).to(run.device)


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the head; the target stays as it is."""
    teacher, model = target(run), build(run)
    rows, spans = (x.to(run.device).long() for x in answers(run, teacher))
    if not loop.begin("eagle", {"eagle": model}, run):
        counts = rows.flatten().bincount(minlength=run.shapes.lm_vocab)
        chosen = counts.topk(len(model.d2t)).indices.sort().values
        model.d2t.copy_(chosen - torch.arange(len(chosen), device=run.device))
        model.t2d[chosen] = True
        last = teacher.model.layers[-1]
        model.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        model.norm.load_state_dict(teacher.model.norm.state_dict())
        model.lm_head.weight.data.copy_(teacher.get_output_embeddings().weight[chosen])
    words = torch.arange(len(model.d2t), device=run.device) + model.d2t
    embedding, batch = teacher.get_input_embeddings(), run.batch or 32

    def loss(_: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = torch.randint(len(rows), (batch,), **loop.factory(generator))
        first, length = spans[drawn].unbind(1)
        ids = rows[drawn, : int(length.max())]
        with torch.no_grad(), run.autocast():
            output = teacher(input_ids=ids, use_cache=False, output_hidden_states=True)
            features = torch.cat([output.hidden_states[source] for source in model.sources], -1)[:, :-1]
            truth = output.logits[:, 1:].float()[..., words].softmax(-1)  # [B, T - 1, V]: what follows token t + 1
            best = output.logits[:, 1:].argmax(-1)
        places = torch.arange(ids.shape[1] - 1, device=ids.device)
        total, logged = torch.zeros((), device=ids.device), {}
        accepted = torch.ones_like(best[:, :1], dtype=torch.bool).expand_as(best)
        with run.autocast():
            states = unrolled(model, features, embedding(ids[:, 1:]), STEPS)
        for step, x in enumerate(states):
            known = (places >= first[:, None] - 1 + step) & (places < length[:, None] - 2)
            with run.autocast():
                scores = model.lm_head(model.norm(x[known])).float()
            total = total + _FADE**step * -(truth[known] * scores.log_softmax(-1)).sum(-1).mean()
            right = torch.zeros_like(accepted)
            right[known] = words[scores.detach().argmax(-1)] == best[known]
            accepted = (F.pad(accepted, (1, 0))[:, :-1] if step else accepted) & right
            logged[f"accepted{step + 1}"] = accepted.sum() / known.sum()
        return total / STEPS, logged

    stage = loop.Stage("eagle", {"eagle": model}, loss, rate=run.rate(5e-3, "eagle"), decay=0.05, average=0.998)
    return loop.train(stage, run)


def load(run: TrainingRun) -> EagleNetwork:
    """The trained head. Raises `FileNotFoundError` when it is not trained."""
    model: EagleNetwork = loop.load_average("eagle", {"eagle": build(run)}, run)
    return model


def export(run: TrainingRun) -> Path:
    """Write the trained head in the published layout, in float16, to `emoji-lm-eagle`; returns the folder."""
    network, folder = load(run), run.models / "emoji-lm-eagle"
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: x.half() if x.is_floating_point() else x for key, x in network.state_dict().items()}
    save_file({key: x.contiguous().cpu() for key, x in state.items()}, folder / "model.safetensors")
    fields = {
        **network.config.to_dict(), "architectures": [ARCHITECTURES[0]],
        "eagle_config": {LAYER_IDS: [*network.sources]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields, indent=2, default=str), encoding="utf-8")
    return folder


if __name__ == "__main__":
    command(__doc__, train, export)
