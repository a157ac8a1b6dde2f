"""Provides the shell of the tests of commands to those of the laboratory's commands."""

from tests.cli.conftest import shell

__all__ = ["shell"]
