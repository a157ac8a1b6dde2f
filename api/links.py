"""Addresses of pictures: what they begin with, and the signature by which one can be fetched without a key.

Knows URLs and HMAC; knows nothing of what lies behind them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from core.jobs.record import Job

_EXPIRES = re.compile(r"[0-9]{1,12}")
_SIGNATURE = re.compile(r"[A-Za-z0-9_-]{43}")


@dataclass(frozen=True, slots=True)
class Links:
    """`base` ends in a slash. With no `secret` links are bare: whoever reaches the service may follow them.

    `clock` is one that all who check signatures share.
    """

    base: str
    secret: bytes | None = None
    lasts_s: float = 3600.0
    clock: Callable[[], float] = time.time

    def image(self, job: Job, k: int, key: str) -> str:
        """The address of a job's k-th picture, whose artifact has this key."""
        bare = f"{self.base}v1/jobs/{job.id}/images/{k}"
        if self.secret is None:
            return bare
        expires = str(int(self.clock() + self.lasts_s))
        # An API of a version before knows a record without an incarnation, and links that name no content.
        content = job.incarnation and key
        return f"{bare}?expires={expires}&signature={sign(self.secret, job.id, k, content, expires)}"


def sign(secret: bytes, job_id: str, k: int, content: str, expires: str) -> str:
    """HMAC-SHA256 of which picture, what it shows (its artifact's key, which is made of the content) and until when
    (seconds since the epoch), in base64url. Whoever has the job's id next has no picture that this is a signature of.
    """
    told = f"{job_id}/{k}/{expires}" + (f"/{content}" if content else "")
    made = hmac.digest(secret, told.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(made).rstrip(b"=").decode()


def signed(secret: bytes, job_id: str, k: int, content: str, expires: str, signature: str, now: float) -> bool:
    """Whether this signature is ours, and its time is not over."""
    if not (_EXPIRES.fullmatch(expires) and _SIGNATURE.fullmatch(signature)):
        return False
    return hmac.compare_digest(signature, sign(secret, job_id, k, content, expires)) and now < int(expires)
