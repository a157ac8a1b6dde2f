"""Finds a model in the hub's cache, whose folders `models--owner--name` have each revision's files in `snapshots`."""

from __future__ import annotations

from pathlib import Path

_KIND = "models--"


def snapshot(folder: Path) -> Path:
    """Return the folder of the files: of a folder of the hub's cache the snapshot of `main`, or the only one there is;
    any other folder itself. Raises LookupError for one that has none, or several without a name.
    """
    snapshots = folder / "snapshots"
    if not folder.resolve().name.startswith(_KIND):
        return folder
    try:
        named = snapshots / (folder / "refs/main").read_text("utf-8").strip()
        if named.is_dir():
            return named
    except (OSError, ValueError):
        pass  # a revision that was downloaded by its hash has no name
    present = [path for path in snapshots.iterdir() if path.is_dir()] if snapshots.is_dir() else []
    if len(present) != 1:
        raise LookupError(f"is a folder of the hub's cache with {len(present)} snapshots, and none is refs/main")
    return present[0]


def model_name(folder: Path) -> str:
    """Return the name of the model in a folder: the folder's own, in the hub's cache the repository's."""
    resolved = folder.expanduser().resolve()
    cache = resolved.parent.parent if resolved.parent.name == "snapshots" else resolved
    return cache.name.rpartition("--")[2] if cache.name.startswith(_KIND) else resolved.name
