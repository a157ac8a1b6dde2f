"""Builds image URLs, and signs them so that an image can be fetched without a key."""

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
class ImageLinks:
    """The links of a service. `base` ends in a slash. Without a `secret` links are unsigned: anyone who reaches the
    service may follow them. `reader` is the key that they are told to.

    `clock` is shared by all processes that verify signatures.
    """

    base: str
    secret: bytes | None = None
    lasts_s: float = 3600.0
    clock: Callable[[], float] = time.time
    reader: str = ""

    def job_id(self, job: Job) -> str:
        """The id by which the reader knows the job: the one that it chose; of another owner's job the record's."""
        return job.name if job.name and job.owner == self.reader else job.id

    def image(self, job: Job, k: int, key: str) -> str:
        """The URL of a job's k-th image, whose artifact has this key. It names the record: who follows it need not be
        the owner.
        """
        bare = f"{self.base}v1/jobs/{job.id}/images/{k}"
        if self.secret is None:
            return bare
        expires = str(int(self.clock() + self.lasts_s))
        # An older API reads no incarnation from a record, and its links name no content.
        content = job.incarnation and key
        return f"{bare}?expires={expires}&signature={sign(self.secret, job.id, k, content, expires)}"


def sign(secret: bytes, job_id: str, k: int, content: str, expires: str) -> str:
    """Return the HMAC-SHA256 of the image's position, its content (its artifact's key) and the expiry time (seconds
    since the epoch), in base64url. If the job's id is reused, the signature matches none of the new job's images.
    """
    payload = f"{job_id}/{k}/{expires}" + (f"/{content}" if content else "")
    signature = hmac.digest(secret, payload.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def signed(secret: bytes, job_id: str, k: int, content: str, expires: str, signature: str, now: float) -> bool:
    """Return whether the signature is valid and has not expired."""
    if not (_EXPIRES.fullmatch(expires) and _SIGNATURE.fullmatch(signature)):
        return False
    return hmac.compare_digest(signature, sign(secret, job_id, k, content, expires)) and now < int(expires)
