"""Stage `draft`: trains the drafter of the language model's blocks (`llm.drafts.dflash`) on what the model writes.

As published: random tokens of answers are anchors, behind each of which masks stand for the block's other tokens; all
blocks of a row are one forward, and tokens far behind their anchor weigh less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from lab.training import checkpoint, lm, loop, tokens
from lab.training.run import TrainingRun, command
from llm.drafts.dflash import DFlashNetwork

ANCHORS = 6  # blocks of a row
_FADE = 4.0  # tokens behind the anchor over which weights fall to 1/e
_CHUNK = {False: 250, True: 4096}  # prompts at a time, on a GPU
_SAMPLED = 0.5  # share of answers that are drawn rather than greedy


def build(run: TrainingRun) -> DFlashNetwork:
    """A fresh drafter, on the run's device."""
    from transformers import Qwen3Config

    shape, target = run.shapes.draft, run.shapes.lm
    torch.manual_seed(run.seed)
    config = Qwen3Config(
        **run.shapes.llama(shape, run.shapes.lm_vocab, 1, 5, 0), head_dim=target.width // target.heads,
        rms_norm_eps=1e-6, layer_types=["full_attention"] * shape.layers,
    )  # fmt: skip
    return DFlashNetwork(config, run.shapes.draft_sources).to(run.device)


def target(run: TrainingRun) -> Any:
    """The trained language model, or else the exported one."""
    from transformers import AutoModelForCausalLM

    try:
        return lm.load(run)
    except FileNotFoundError:
        model: Any = AutoModelForCausalLM.from_pretrained(
            run.models / "emoji-lm", dtype=torch.float32, local_files_only=True
        )
        return model.to(run.device).eval().requires_grad_(False)


def answers(run: TrainingRun, model: Any) -> tuple[Tensor, Tensor]:
    """Token rows [N, LENGTH] of prompts with the model's answers, and each row's first token of the answer and its
    length, [N, 2]; kept in `draft/answers.pt`.
    """
    path = run.folder("draft") / "answers.pt"
    if (state := checkpoint.load(path)) is None:
        state = {"rows": _written(run, model)}
        checkpoint.save(path, state)
    rows, spans = state["rows"]
    return rows, spans


def _written(run: TrainingRun, model: Any) -> tuple[Tensor, Tensor]:
    count = run.shapes.answers
    data, generator = lm.corpus(run, count // 2), torch.Generator().manual_seed(run.seed)
    picked = torch.randperm(len(data.chats), generator=generator)[: count - count // 8].tolist()
    prompts = [row[:first] for row, first in zip(
        data.chats[picked].tolist(), data.chats_said[picked].int().argmax(1).tolist(), strict=True
    )]  # fmt: skip
    for row in torch.randint(len(data.coco), (count // 8,), generator=generator).tolist():
        prompts.append(data.coco[row, : 2 + row % 7].tolist())
    prompts.sort(key=len)
    tokenizer = tokens.lm_tokenizer(run)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    rows = torch.full((len(prompts), lm.LENGTH), pad, dtype=torch.int16)
    spans = torch.zeros(len(prompts), 2, dtype=torch.int16)
    torch.manual_seed(run.seed)
    size = _CHUNK[run.on_gpu]
    for number, first in enumerate(range(0, len(prompts), size)):
        chunk = prompts[first : first + size]
        width = max(map(len, chunk))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in chunk], device=run.device)
        sampled = (number * _SAMPLED) % 1 >= _SAMPLED
        with torch.no_grad(), run.autocast():
            written = model.generate(
                input_ids=ids, attention_mask=(ids != pad).long(), max_new_tokens=lm.LENGTH - width, do_sample=sampled,
                pad_token_id=pad, eos_token_id=end, **({"top_k": 0} if sampled else {}),
            )[:, width:].cpu()  # fmt: skip
        for row, (prompt, answer) in enumerate(zip(chunk, written.tolist(), strict=True), first):
            answer = answer[: answer.index(end) + 1] if end in answer else answer
            both = prompt + answer
            rows[row, : len(both)] = torch.tensor(both, dtype=torch.int16)
            spans[row] = torch.tensor([len(prompt), len(both)])
        if number % 10 == 0:
            print(f"draft: {first + len(chunk)} of {len(prompts)} answers", flush=True)
    return rows[spans[:, 1] - spans[:, 0] > 1], spans[spans[:, 1] - spans[:, 0] > 1]


def features(model: Any, ids: Tensor, sources: tuple[int, ...]) -> Tensor:
    """Hidden states [B, T, sources · C] that these layers of the target return."""
    states = model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[source + 1] for source in sources], -1)


def states(model: DFlashNetwork, x: Tensor, context: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    """Normed hidden states of blocks' embeddings x [B, R, C] at `positions` [B, R], beside all of the context's
    features [B, T, sources · C]; `seen` [B, R, T + R] tells which rows of both each row attends to.
    """
    h = model.hidden_norm(model.fc(context))
    places = torch.cat([torch.arange(h.shape[1], device=h.device).expand(len(h), -1), positions], 1)
    angles = model.rotary_emb(x, places)
    for layer in model.layers:
        attention: Any = layer.self_attn
        rows = torch.cat([h, layer.input_layernorm(x)], 1)  # type: ignore[operator]
        split = (*rows.shape[:2], -1, attention.head_dim)
        q = attention.q_norm(attention.q_proj(rows[:, h.shape[1] :]).view(*x.shape[:2], -1, attention.head_dim))
        k = attention.k_norm(attention.k_proj(rows).view(split)).transpose(1, 2)
        q, k = (
            apply_rotary_pos_emb(z, z, *(part[:, -z.shape[2] :] for part in angles))[0] for z in (q.transpose(1, 2), k)
        )
        v = attention.v_proj(rows).view(split).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
        x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))  # type: ignore[operator]
    normed: Tensor = model.norm(x)
    return normed


def blocks(model: DFlashNetwork, teacher: Any, ids: Tensor, anchors: Tensor, size: int, mask: int) -> Tensor:
    """Normed hidden states [B, N, size, C] of blocks behind the tokens `anchors` [B, N] of rows ids [B, T], each of
    which sees what is before its anchor, and itself.
    """
    (rows, width), count, device = ids.shape, anchors.shape[1], ids.device
    embedding = teacher.get_input_embeddings()
    with torch.no_grad():
        context = features(teacher, ids, model.sources)
        x = embedding.weight[mask].expand(rows, count, size, -1).clone()
        x[:, :, 0] = embedding(ids.gather(1, anchors))
    before = torch.arange(width, device=device) < anchors[..., None, None]  # [B, N, 1, T]
    owner = torch.arange(count, device=device).repeat_interleave(size)
    within = (owner[:, None] == owner).expand(rows, -1, -1)
    seen = torch.cat([before.expand(-1, -1, size, -1).flatten(1, 2), within], -1)
    positions = anchors[..., None] + torch.arange(size, device=device)
    return states(model, x.flatten(1, 2).to(context.dtype), context, positions.flatten(1), seen).view(*x.shape)


def train(run: TrainingRun) -> loop.StageOutcome:
    """Train the drafter; the target stays as it is."""
    teacher, model = target(run), build(run)
    rows, spans = (x.to(run.device).long() for x in answers(run, teacher))
    if not loop.begin("draft", {"draft": model}, run):  # layers and norm begin as the target's last ones
        model.norm.load_state_dict(teacher.model.norm.state_dict())
        for layer, other in zip(model.layers[::-1], teacher.model.layers[::-1], strict=False):
            layer.load_state_dict(other.state_dict(), strict=False)
    block, batch = run.shapes.draft_block, run.batch or (256 if run.on_gpu else 32)
    forward = run.compiled(blocks)
    offsets = torch.arange(block, device=run.device)
    weights = torch.exp(-(offsets[1:] - 1) / _FADE)
    head, mask = teacher.get_output_embeddings(), tokens.lm_tokenizer(run).pad_token_id

    def loss(_: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        factory = loop.factory(generator)
        drawn = torch.randint(len(rows), (batch,), **factory)
        first, length = spans[drawn].unbind(1)
        ids = rows[drawn] if run.compile else rows[drawn, : int(length.max())]
        share = torch.rand(batch, ANCHORS, **factory)
        anchors = first[:, None] + (share * (length - 1 - first)[:, None]).long()
        positions = anchors[..., None] + offsets[1:]  # [B, anchors, block - 1]
        known = positions < length[:, None, None]
        truth = ids.gather(1, positions.clamp(max=ids.shape[1] - 1).flatten(1)).view(positions.shape)[known]
        with run.autocast():
            scores = head(forward(model, teacher, ids, anchors, block, mask)[:, :, 1:][known]).float()
        losses = F.cross_entropy(scores, truth, reduction="none")
        weight = weights.expand(batch, ANCHORS, -1)[known]
        right = torch.zeros(known.shape, device=run.device)
        right[known] = (scores.detach().argmax(-1) == truth).float()
        accepted = right.cumprod(-1).sum() / known[:, :, 0].sum()
        return (losses * weight).sum() / weight.sum(), {"accepted": accepted, "right": right.sum() / len(truth)}

    stage = loop.Stage("draft", {"draft": model}, loss, rate=run.rate(5e-3, "draft"), decay=0.05, average=0.998)
    return loop.train(stage, run)


def load(run: TrainingRun) -> DFlashNetwork:
    """The trained drafter. Raises `FileNotFoundError` when it is not trained."""
    model: DFlashNetwork = loop.load_average("draft", {"draft": build(run)}, run)
    return model


if __name__ == "__main__":
    command(__doc__, train)
