"""Stage `draft`: the small imitator of the language model, for speculative decoding.

Only the command lives here.
"""

from __future__ import annotations

from training import lm
from training.run import from_options, parser


def main() -> None:
    """`python -m training.draft`."""
    print(lm.train(from_options(parser(__doc__ or "").parse_args()), draft=True))


if __name__ == "__main__":
    main()
