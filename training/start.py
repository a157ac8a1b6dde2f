"""Stage `start`: lets training begin where the exported language models ended, with their tokenizer.

    python -m training.start --text --data DATA --work WORK --models models

It leaves `start/lm.pt`, `start/draft.pt` and `tokens/lm`, so that `tokens` need not come before it.
"""

from __future__ import annotations

import torch

from training import checkpoint
from training.run import TrainingRun, from_options, parser


def convert_text(run: TrainingRun) -> None:
    """Write `start/lm.pt`, `start/draft.pt` and `tokens/lm` of the exported models; raises `OSError` without them."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(run.models / "emoji-lm", dtype=torch.float32, local_files_only=True)
    checkpoint.save(run.folder("start") / "lm.pt", {"lm": model.state_dict()})
    checkpoint.save(
        run.folder("start") / "draft.pt", {"draft": load_file(run.models / "emoji-lm-draft" / "model.safetensors")}
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run.models / "emoji-lm", local_files_only=True)
    tokenizer.save_pretrained(run.folder("tokens") / "lm")


def main() -> None:
    """`python -m training.start --text`."""
    options = parser(__doc__ or "")
    options.add_argument("--text", action="store_true", required=True, help="begin with the exported language models")
    convert_text(from_options(options.parse_args()))


if __name__ == "__main__":
    main()
