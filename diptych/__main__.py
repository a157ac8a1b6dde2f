"""`python -m diptych …` and the script `diptych` run this module."""

import os
import signal


def entry() -> None:
    """Run the command line. An interrupt of its imports has nothing to undo, and shows nobody a traceback."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from cli import entry as run

    run()


if __name__ == "__main__":
    entry()
