"""Batches: which requests of a lane share the next forward, and which are in flight on each lane."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from core.batching.limits import Limits
from core.batching.policy import Groups, Key, SchedulingPolicy
from core.batching.request import Request
from core.batching.runner import PreemptibleRunner, Runner
from core.batching.shares import Shares

_QUEUE_BEHIND_LOSS = 1.05  # a second batch may queue behind one if that costs at most 5% over one wider batch


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that share one forward. `rows` counts their rows, before any padding to a bucket."""

    runner: Runner
    group: Hashable
    lane: str
    requests: list[Request]
    rows: int


class Batcher:
    """Forms the next batch of each lane by the policy's rules. A lane holds up to `depth` of them, in `flying`."""

    def __init__(
        self, runners: Mapping[str, Runner], policy: SchedulingPolicy, limits: Limits, shares: Shares, *, depth: int
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._runners = runners
        self._policy = policy
        self._limits = limits
        self._shares = shares
        self._depth = depth
        self._growing = {name for name, runner in runners.items() if isinstance(runner, PreemptibleRunner)}
        self._launches = 0
        self._launched: dict[tuple[str, Hashable], int] = {}  # of growing runners, by modality and group: the last one
        self.flying: dict[str, list[Batch]] = {}
        self._yielded: set[str] = set()  # lanes whose last batch was a one-shot that went before an aged request
        self._held: set[str] = set()  # lanes whose last batch was one that the leader was held for

    def ready(self, running: Mapping[str, Mapping[str, Request]]) -> dict[str, dict[Key, list[Request]]]:
        """The running requests that are not in flight, by modality: by lane and by who may share a forward."""
        lanes: dict[str, dict[Key, list[Request]]] = {}
        for name, requests in running.items():
            runner, own = self._runners[name], dict[tuple[Hashable, str], list[Request]]()
            for request in requests.values():
                if not request.in_flight:
                    key = runner.group(request), request.id if request.alone else ""
                    if (group := own.get(key)) is None:
                        group = own[key] = []
                    group.append(request)
            for (group_key, alone), ready in own.items():
                lanes.setdefault(runner.lane_of(group_key), {})[name, group_key, alone] = ready
        return lanes

    def form(self, lane: str, groups: Groups, now: float) -> Batch | None:
        """The batch that runs next on a lane, or None where it has no free place or waiting is better."""
        if len(self.flying.get(lane, ())) >= self._depth:
            return None
        for requests in groups.values():
            self._shares.sort(requests)
        led = self._leader(groups)
        if self._shares.yields(groups[led][0]):
            return None
        aged = groups[led][0].aged
        # retries first, or the first one to succeed would run ahead alone and its cohort never meet again
        retries = [key for key in groups if key[2] and key[:2] == led[:2]]
        if retries:
            led, one_shot, cohort = min(retries, key=lambda key: groups[key][0].urgency), None, None
        else:
            one_shot, cohort = self._before(lane, led, groups, now)
        batch = self._batch(lane, one_shot or cohort or led, groups)
        if any(self._joins_later(batch, flying, aged) for flying in self.flying.get(lane, ())):
            return None
        _put(self._yielded, lane, aged and one_shot is not None)
        _put(self._held, lane, cohort is not None)
        return batch

    def _leader(self, groups: Groups) -> Key:
        """The group of the most urgent request. Those of a growing runner take turns as long as they are of one
        account and priority: each of their requests waits for its next word.
        """
        orders = {key: self._shares.order(requests[0]) for key, requests in groups.items()}
        led = min(groups, key=orders.__getitem__)
        if led[0] not in self._growing:
            return led

        def rank(key: Key) -> tuple[object, ...]:
            level, charged, turn = orders[key]
            return key[0], level, charged, turn[0]

        peers = [key for key in groups if rank(key) == rank(led)]
        return min(peers, key=lambda key: (self._launched.get(key[:2], 0), orders[key]))

    def _before(self, lane: str, led: Key, groups: Groups, now: float) -> tuple[Key | None, Key | None]:
        """The group that goes before the leader's: a one-shot one, or a cohort. At most one of the two."""
        aged = groups[led][0].aged
        if not (aged and lane in self._yielded):
            one_shot = self._policy.one_shot_before(led, groups, now)
            if one_shot is not None:
                return one_shot, None
        if aged or lane in self._held:
            return None, None
        return None, self._policy.cohort_before(led, groups, now)

    def _batch(self, lane: str, key: Key, groups: Groups) -> Batch:
        name, group, alone = key
        runner = self._runners[name]
        requests = self._policy.widest(runner, group, groups[key], bool(alone))
        return Batch(runner, group, lane, requests, sum(runner.rows(r) for r in requests))

    def _joins_later(self, batch: Batch, flying: Batch, aged: bool) -> bool:
        """Return whether the batch should not queue behind one that is in flight, but wait for that one's end."""
        first, runner, group = batch.requests[0], batch.runner, batch.group
        if not aged and any(r.tenant == first.tenant and r.priority < first.priority for r in flying.requests):
            return True
        # Behind a batch of its own group a second one is worth its place only where cost is linear in
        # rows: elsewhere its requests do better to join the first ones at the next iteration.
        together = flying.rows + batch.rows
        same = flying.group == group and flying.runner is runner
        if not same or together > self._limits.of(runner, group):
            return False
        apart_s = runner.cost(group, flying.rows) + runner.cost(group, batch.rows)
        return apart_s > _QUEUE_BEHIND_LOSS * runner.cost(group, together)

    def launch(self, batch: Batch) -> None:
        """The batch is in flight from now on, and its tenants are charged for it."""
        for request in batch.requests:
            request.in_flight = True
        if batch.runner.modality in self._growing:
            self._launches += 1
            self._launched[batch.runner.modality, batch.group] = self._launches
        self.flying.setdefault(batch.lane, []).append(batch)
        self._shares.charge(batch.runner, batch.group, batch.requests, batch.rows)

    def land(self, batch: Batch) -> None:
        """The batch has ended, however it did."""
        self.flying[batch.lane].remove(batch)
        for request in batch.requests:
            request.in_flight = False


def _put(lanes: set[str], lane: str, present: bool) -> None:
    if present:
        lanes.add(lane)
    else:
        lanes.discard(lane)
