"""Addresses of pictures: what they begin with, and the signature by which one can be fetched without a key.

Knows URLs and HMAC; knows nothing of what lies behind them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from dataclasses import dataclass

_EXPIRES = re.compile(r"[0-9]{1,12}")
_SIGNATURE = re.compile(r"[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class Links:
    """`base` ends in a slash. With no `secret` links are bare: whoever reaches the service may follow them."""

    base: str
    secret: bytes | None = None
    lasts_s: float = 3600.0

    def image(self, job_id: str, k: int) -> str:
        """The address of a job's k-th picture."""
        bare = f"{self.base}v1/jobs/{job_id}/images/{k}"
        if self.secret is None:
            return bare
        expires = str(int(time.time() + self.lasts_s))
        return f"{bare}?expires={expires}&signature={sign(self.secret, job_id, k, expires)}"


def sign(secret: bytes, job_id: str, k: int, expires: str) -> str:
    """HMAC-SHA256 of which picture and until when (seconds since the epoch), in base64url."""
    made = hmac.digest(secret, f"{job_id}/{k}/{expires}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(made).rstrip(b"=").decode()


def signed(secret: bytes, job_id: str, k: int, expires: str, signature: str) -> bool:
    """Whether this signature is ours, and its time is not over."""
    if not (_EXPIRES.fullmatch(expires) and _SIGNATURE.fullmatch(signature)):
        return False
    return hmac.compare_digest(signature, sign(secret, job_id, k, expires)) and time.time() < int(expires)
