"""Keeps current what a release is made of: constraints.txt with hashes, base images by digest; `make pins` calls it.

    python -m deployment.pins [packages] [images] [--uv PATH] [--upgrade]

Packages stay at their versions unless pyproject.toml asks for others or `--upgrade` for the newest; their hashes are
those of all files that the index has of a release, so that every platform verifies its own. Images keep their tags.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 20.0
HEAD = """\
# Exact versions of a fresh install, extras and the group `tools` included, with the hashes of each release's files.
# Written by `make pins`, read by install.py, which has pip refuse every other file. pyproject.toml says what is needed,
# this file what was resolved, and under `via` for what. One file is taken without a hash: a build of torch other than
# the index's own (CPU builds, whose files PyTorch's index and mirrors of it may build anew) that install.py picked.

"""
FILES = ("Dockerfile", "docker-compose.yml")
_IMAGE = re.compile(
    r"^(\s*(?:FROM|image:)\s+)([a-z0-9][a-z0-9./:_-]*):([A-Za-z0-9_][\w.-]*)(?:@(sha256:[0-9a-f]{64}))?(?=\s|$)",
    re.MULTILINE,
)
_MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.index.v1",
        "docker.distribution.manifest.list.v2",
        "oci.image.manifest.v1",
        "docker.distribution.manifest.v2",
    )
)


class Unresolved(Exception):
    """A registry did not return an image's digest."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deployment.pins")
    parser.add_argument("what", nargs="*", choices=["packages", "images", []], help="both, if none is named")
    parser.add_argument("--uv", default="uv", help="the uv that resolves")
    parser.add_argument("--upgrade", action="store_true", help="every package to the newest that fits")
    options = parser.parse_args()
    targets = options.what or ["packages", "images"]
    code = pin_packages(ROOT, options.uv, upgrade=options.upgrade) if "packages" in targets else 0
    if code == 0 and "images" in targets:
        for line in (failed := pin_images(ROOT)):
            print(f"pins: {line}", file=sys.stderr)
        code = 1 if failed else 0
    return code


def pin_packages(root: Path, uv: str, *, upgrade: bool = False) -> int:
    """Write `root`'s constraints.txt for its pyproject.toml, all or nothing. uv's exit status."""
    constraints = root / "constraints.txt"
    with tempfile.TemporaryDirectory(dir=root, prefix=".pins-") as folder:
        pinned = Path(folder, constraints.name)
        if constraints.exists() and not upgrade:
            pinned.write_bytes(constraints.read_bytes())  # the versions that uv keeps to where it can
        command = [
            uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes",
            "--all-extras", "--group", "tools", "--no-header", "--output-file", str(pinned), "pyproject.toml",
        ]  # fmt: skip
        code = subprocess.run(command, cwd=root).returncode
        if code == 0:
            text = HEAD + pinned.read_text("utf-8")
            if not constraints.exists() or text != constraints.read_text("utf-8"):  # what hangs on it is made anew
                pinned.write_text(text, "utf-8")
                pinned.replace(constraints)
    return code


def pin_images(root: Path) -> list[str]:
    """Write the digest of each tag beside it, in `FILES`. What could not be: a line for each image, which stays."""
    digests: dict[str, str] = {}
    failed: dict[str, str] = {}

    def pinned(match: re.Match[str]) -> str:
        before, name, tag, _ = match.groups()
        image = f"{name}:{tag}"
        if image not in digests and image not in failed:
            try:
                digests[image] = digest_of(name, tag)
            except Unresolved as error:
                failed[image] = f"{image} stays as it is: {error}"
        return f"{before}{image}@{digests[image]}" if image in digests else match[0]

    for file in (root / name for name in FILES):
        text = file.read_text("utf-8")
        now = _IMAGE.sub(pinned, text)
        if now != text:
            file.write_text(now, "utf-8")
    return list(failed.values())


def digest_of(name: str, tag: str) -> str:
    """The digest of what the tag names in its registry, of all platforms together. Raises `Unresolved`."""
    first, _, rest = name.partition("/")
    if rest and (first == "localhost" or re.search(r"[.:]", first)):
        host, path = first, rest
    else:
        host, path = "registry-1.docker.io", name if rest else f"library/{name}"
    scheme = "http" if re.match(r"(localhost|127\.[0-9.]+)(:|$)", host) else "https"  # as Docker does
    request = urllib.request.Request(f"{scheme}://{host}/v2/{path}/manifests/{tag}", headers={"Accept": _MANIFESTS})
    try:
        try:
            manifest, body = _get(request)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            request.add_header("Authorization", f"Bearer {_token(error.headers.get('WWW-Authenticate', ''))}")
            manifest, body = _get(request)
    except urllib.error.HTTPError as error:
        raise Unresolved(f"{host} answers {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise Unresolved(f"{host} does not answer ({error})") from None
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if manifest not in ("", digest):
        raise Unresolved(f"{host} sends another manifest than it says")
    return digest


def _get(request: urllib.request.Request) -> tuple[str, bytes]:
    """The digest in the registry's response, and its body."""
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.headers.get("Docker-Content-Digest", ""), answer.read()


def _token(challenge: str) -> str:
    """An anonymous token, from the address in the registry's challenge. Raises OSError, ValueError."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    if not challenge.lower().startswith("bearer ") or "realm" not in fields:
        raise ValueError("it wants a login")
    query = urllib.parse.urlencode({name: fields[name] for name in ("service", "scope") if name in fields})
    _, body = _get(urllib.request.Request(f"{fields['realm']}?{query}"))
    answer = json.loads(body)
    return str(answer.get("token") or answer["access_token"])


if __name__ == "__main__":
    sys.exit(main())
