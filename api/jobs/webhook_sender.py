"""Delivers webhooks for ended jobs, with retries, and for running ones, without.

Deliveries run on a pool of threads, in turn by owner and receiver. webhooks.py makes the call, core.jobs.webhooks
queues them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from dataclasses import replace
from functools import partial

from api.concurrency.poller import Poller
from api.concurrency.tenant_pool import Deadline, TenantPool
from api.dialects.predictions.objects import FORM, prediction
from api.http.guarded_http import Unreachable
from api.jobs.presentation import job_object
from api.jobs.webhooks import ANSWER_S, call, sign
from api.service import Service
from core.jobs.connection import StoreError
from core.jobs.keyring import webhook_secret
from core.jobs.record import Job, JobState
from core.jobs.webhooks import DueWebhook, WebhookQueue

log = logging.getLogger(__name__)

_PAUSES_S = (5, 30, 120, 600, 3600, 3 * 3600, 6 * 3600)  # between attempts; then it is given up
_AT_ONCE, _OF_OWNER, _OF_RECEIVER = 64, 32, 4  # calls in progress; without keys all belong to one owner
_SOON_S = 2.0  # delay if the call could not be made for a local reason


class WebhookSender:
    """Takes due webhooks and calls the receivers. Every API runs one; each webhook is taken by one at a time."""

    def __init__(self, service: Service, pauses_s: tuple[float, ...] = _PAUSES_S) -> None:
        self._service = service
        self._webhooks = WebhookQueue.of(service.settings)  # on its own connections: many calls may end at once
        self._pauses_s = pauses_s
        self._private = service.settings.webhook_private
        self._pool = TenantPool("webhooks", _AT_ONCE, of_tenant=_OF_OWNER, of_lane=_OF_RECEIVER, item_s=ANSWER_S)
        self._poller = Poller("webhooks", "webhooks", self._look)

    def start(self) -> None:
        self._poller.start()

    def stop(self) -> None:
        """Stop sending. Calls in progress are aborted, and repeated by the next API that takes them."""
        self._poller.stop()
        self._pool.stop()
        self._webhooks.close()

    def _look(self) -> None:
        room = self._pool.room
        if not room:
            return
        owners, lanes = self._pool.full()
        # Nobody else takes these until they must have ended here, including the wait in the pool.
        for due in self._webhooks.due(
            6 * ANSWER_S, room, of_owner=_OF_OWNER, of_lane=_OF_RECEIVER, without=owners, without_lanes=lanes
        ):
            self._pool.submit(due.owner, due.host, f"{due.id} {due.incarnation} {due.live}", partial(self._tell, due))

    def _tell(self, due: DueWebhook, bound: Deadline) -> None:
        """One attempt. Any error counts as a failed one, unless its cause is local."""
        try:
            job = self._service.store.get(due.id)
            if job is None or job.webhook is None or job.incarnation != due.incarnation:
                self._webhooks.settle(due)  # erased meanwhile
            elif not self._service.cards.now.secret:
                self._webhooks.again(due, _SOON_S, failed=False)  # Redis has not been read yet
            else:
                self._try(due, job, bound)
        except StoreError as error:
            log.warning("webhook of job %s is retried later: %s", due.id, error)  # it is retried automatically
        finally:
            self._poller.wake()

    def _try(self, due: DueWebhook, job: Job, bound: Deadline) -> None:
        try:
            self._call(due, job, bound)
        except Exception as error:
            if self._pool.stopping:
                with contextlib.suppress(StoreError):
                    self._webhooks.again(due, 0, failed=False)
                return
            if not isinstance(error, Unreachable):
                log.exception("unexpected error in the webhook of job %s", due.id)
            if due.live:  # what comes next says more
                log.info("webhook of job %s, which runs, is not delivered: %s", due.id, error)
                self._webhooks.settle(due)
            elif due.tries >= len(self._pauses_s):
                log.warning("webhook of job %s is given up after %d attempts: %s", due.id, due.tries + 1, error)
                self._webhooks.settle(due)
            else:
                log.info("webhook of job %s is retried later: %s", due.id, error)
                self._webhooks.again(due, self._pauses_s[due.tries])
        else:
            self._webhooks.settle(due)

    def _call(self, due: DueWebhook, job: Job, bound: Deadline) -> None:
        assert job.webhook is not None
        now, webhook = self._service.cards.now, job.webhook
        links = self._service.links_from(webhook["base"], self._service.settings.link_s, job.owner)
        # Receivers drop duplicates by message id: the incarnation separates this job from a later one with its id.
        timestamp, message = int(time.time()), f"msg_{job.id}_{job.incarnation or job.attempt}"
        if due.live:
            message += f"_{(job.progress or {}).get('steps_done', 0)}"
            job = replace(job, state=JobState.RUNNING, ended=None, result=None, error=None)  # it may have ended since
        if webhook.get("form") == FORM:
            event = prediction(job, links)
        else:
            event = {"type": f"job.{job.state.value}", "timestamp": job.ended, "data": job_object(job, links)}
        body = json.dumps(event, separators=(",", ":"), allow_nan=False).encode()
        headers = {
            "Content-Type": "application/json", "User-Agent": "diptych", "webhook-id": message,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(webhook_secret(now.secret, job.owner), message, timestamp, body),
        }  # fmt: skip
        call(webhook["url"], headers, body, private=self._private, bound=bound)
