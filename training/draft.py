"""Stage `draft`: trains the language model's draft model, for speculative decoding. The training itself is in `lm`."""

from __future__ import annotations

from training import lm
from training.run import from_options, parser


def main() -> None:
    """`python -m training.draft`."""
    print(lm.train(from_options(parser(__doc__ or "").parse_args()), draft=True))


if __name__ == "__main__":
    main()
