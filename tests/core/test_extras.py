"""The command that installs an extra names what pip can find from where the code lies."""

from __future__ import annotations

import tomllib

from core.extras import pip_install
from tests.deployment.served import ROOT


def test_in_a_checkout_and_in_an_installed_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for extra in ("serve", "otel", "eval", "text"):
        assert extra in extras
        assert pip_install(extra) == f"pip install '.[{extra}]'"
        assert pip_install(extra, "diptych.core.extras") == f"pip install 'diptych[{extra}]'"
