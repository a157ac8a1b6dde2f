"""Stage `tokens`: trains the vocabulary of the language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from evaluation.scenes import emoji
from training import phrases
from training.run import TrainingRun, command

LM_SPECIAL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(run: TrainingRun) -> None:
    """Write `tokens/lm`."""
    _write_lm(run.folder("tokens") / "lm", phrases.corpus(run.data, emoji.read_rows(run.data)), run.shapes.lm_vocab)


def lm_tokenizer(run: TrainingRun) -> Any:
    """The trained tokenizer, with its chat template. Raises `FileNotFoundError` before the stage has run."""
    from transformers import PreTrainedTokenizerFast

    folder = run.work / "tokens" / "lm"
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: run the stage tokens first")
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _write_lm(folder: Path, text: list[str], size: int) -> None:
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(LM_SPECIAL),
        show_progress=False,
    )
    trained.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    command(__doc__, train)
