"""Collects these tests only if TEST_COMPOSE is set, as in `make test-compose`: building images takes minutes."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TEST_COMPOSE") else ["test_*.py"]
