"""`python -m diptych …` is `diptych …`."""

from cli import entry

if __name__ == "__main__":
    entry()
