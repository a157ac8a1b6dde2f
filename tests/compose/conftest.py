"""Collected only where TEST_COMPOSE is set, as `make test-compose` does: images are built, which takes minutes."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TEST_COMPOSE") else ["test_*.py"]
