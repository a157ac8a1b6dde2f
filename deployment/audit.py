"""Asks for known vulnerabilities of what constraints.txt pins; `make audit` calls it.

    python -m deployment.audit [OPTION OF pip-audit …]

Ends with 0 where every package was looked up and none is known to be vulnerable, 1 where one is, and 2 where the
service did not answer for all: pip-audit itself ends with 0 where it found out nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


def main() -> int:
    command = [
        sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--requirement", str(CONSTRAINTS),
        "--format", "json", "--progress-spinner", "off", *sys.argv[1:],
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        findings: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"audit: nothing was looked up: the vulnerability service did not answer ({reason})", file=sys.stderr)
        return 2
    lines, skipped = report(findings)
    print(*lines, sep="\n")
    if skipped:
        print(f"audit: {len(skipped)} of {len(findings)} were not looked up, {skipped[0]}", file=sys.stderr)
    return 1 if len(lines) > 1 else 2 if skipped or not findings else 0


def report(findings: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the lines to print, one for each vulnerability and one with their number; and what was not looked up."""
    lines = [
        f"{finding['name']} {finding['version']}: {flaw['id']}, "
        f"mended in {', '.join(flaw['fix_versions']) or 'no release'}"
        for finding in findings
        for flaw in finding.get("vulns", ())
    ]
    skipped = [f"{finding['name']}: {finding['skip_reason']}" for finding in findings if "skip_reason" in finding]
    return [*lines, f"{len(lines)} vulnerabilities in {len(findings) - len(skipped)} packages"], skipped


if __name__ == "__main__":
    sys.exit(main())
