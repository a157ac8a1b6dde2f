"""Start-time fair queueing (Goyal, Vin and Cheng, 1996) of device time among tenants.

With one tenant the order of requests is unchanged. A tenant has up to two accounts, one for each class of its requests.
An account is charged seconds of the device, by the cost curves, and the account that was charged the least goes next.
An account that begins to run starts no lower than `_BURST_S` below virtual time, at which all live accounts would stand
had each been charged the same: so much unused time is saved up (as in borrowed-virtual-time scheduling, Duda and
Cheriton, 1999), so that a tenant that takes less than its share has the device at once when it comes back. Used time is
not forgotten by leaving. While such a tenant is away, others' batches are no wider than throughput needs (`expects`).

A priority orders the requests of one tenant only, and never puts one before another tenant's. Requests of a higher
number than the default (`PRIORITY`) are deferrable: their account comes after all accounts of the first class, until a
request is its tenant's aged one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from operator import attrgetter

from contract.bounds import PRIORITY
from core.batching.request import Request
from core.batching.runner import PreemptibleRunner, Runner

_BURST_S = 2.0  # of the device, of all accounts with credit together: what others then wait for
_AWAY_S = 60.0  # of the device; whoever is away for longer is not expected
_BESIDE = 1.1  # an iteration that others make this much slower costs them nothing, and they may always join it

Account = tuple[str, bool]
"""A tenant, and whether its requests are deferrable: of a higher priority number than the default, and not aged."""
Order = tuple[bool, float, tuple[int, float, int]]
"""Sort key: deferrable requests last, then the account that was charged the least, then the tenant's own order."""


_URGENCY, _AGED = attrgetter("priority", "due", "sequence"), attrgetter("aged")


class _Device:
    """Accounts of all that takes turns on one device. `virtual` is by class."""

    def __init__(self) -> None:
        self.live: Counter[Account] = Counter()
        self.running: Counter[Account] = Counter()
        self.charged: dict[Account, float] = {}
        self.virtual = [0.0, 0.0]
        self.busy_s = 0.0
        self.left: dict[Account, float] = {}  # `busy_s` when an account was live last

    def clear(self) -> None:
        """Forget all: nobody has waited for anybody."""
        self.charged.clear()
        self.left.clear()
        self.virtual = [0.0, 0.0]

    def lift(self, account: Account) -> None:
        """Begin no lower than virtual time less the credit, of which live accounts have `_BURST_S` together."""
        virtual = self.virtual[account[1]]
        live = [other for other in self.live if other[1] == account[1] and other != account]
        credit_s = max(0.0, _BURST_S - sum(max(0.0, virtual - self.charged[other]) for other in live))
        self.charged[account] = max(self.charged.get(account, 0.0), virtual - credit_s)

    def forget(self) -> None:
        """Forget accounts that would begin no lower without their entries, where these are many."""
        if len(self.charged) > 2 * len(self.live) + 16:
            gone = [a for a, s in self.charged.items() if a not in self.live and s <= self.virtual[a[1]] - _BURST_S]
            for account in gone:
                del self.charged[account]
                self.left.pop(account, None)


def account(request: Request) -> Account:
    """The account that a request is charged to."""
    return request.tenant, request.priority > PRIORITY and not request.aged


class Shares:
    """Seconds that each account was charged, of each device that runners take turns on."""

    def __init__(self, runners: Mapping[str, Runner]) -> None:
        # A runner whose iterations overlap others' has the device to itself; all others take turns on one.
        names = {
            name: name if isinstance(runner, PreemptibleRunner) and runner.overlaps else ""
            for name, runner in runners.items()
        }
        devices = {name: _Device() for name in names.values()}
        self._devices = {modality: devices[name] for modality, name in names.items()}

    # -- who is there ----------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """The request is live from now on, and waits."""
        device, key = self._devices[request.modality], account(request)
        if not device.live:
            device.clear()
        device.forget()
        if key not in device.live:
            device.lift(key)
        device.live[key] += 1

    def leave(self, request: Request) -> None:
        """Record that a request has ended, or was taken out; it no longer runs."""
        device, key = self._devices[request.modality], account(request)
        _decrement(device.live, key)
        if key not in device.live:
            device.left[key] = device.busy_s

    def begin(self, request: Request) -> None:
        """Record that a request was admitted."""
        device, key = self._devices[request.modality], account(request)
        if key not in device.running:
            device.lift(key)
        device.running[key] += 1

    def stop(self, request: Request) -> None:
        """Record that a request ends, or waits again."""
        _decrement(self._devices[request.modality].running, account(request))

    def charge(self, runner: Runner, group: Hashable, requests: Sequence[Request], rows: int) -> None:
        """They share an iteration of so many rows: the first one's account pays what it takes alone, others the rest.

        Where the rest is next to nothing the first one's pays it all: nobody is to go without turns for what cost
        nobody anything.
        """
        device, key = self._devices[runner.modality], account(requests[0])
        seconds, tenant = runner.cost(group, rows), requests[0].tenant
        device.busy_s += seconds
        joined = [(account(r), runner.rows(r)) for r in requests if r.tenant != tenant]
        total_cost = sum(cost for _, cost in joined)
        alone_s = runner.cost(group, rows - total_cost) if joined else seconds
        running = [other for other in device.running if other[1] == key[1]]
        least_s = min(device.charged[other] for other in running)
        if seconds <= _BESIDE * alone_s:
            alone_s = seconds
        device.charged[key] += alone_s
        for other, cost in joined:
            device.charged[other] += (seconds - alone_s) * cost / total_cost
        # What an account with credit is charged puts nobody behind: virtual time passes none of those that run.
        fluid_s = device.virtual[key[1]] + seconds / sum(other[1] == key[1] for other in device.live)
        most_s = max(device.charged[other] for other in running)
        device.virtual[key[1]] = max(device.virtual[key[1]], min(fluid_s, most_s), least_s)

    def expects(self, modality: str, tenant: Hashable) -> bool:
        """Return whether another tenant that is owed time of the device has left it a short while ago."""
        device = self._devices[modality]
        return any(
            device.busy_s - left_s <= _AWAY_S
            and device.charged[other] < device.virtual[other[1]]
            and other[0] != tenant
            for other, left_s in device.left.items()
            if other not in device.live
        )

    # -- who goes first --------------------------------------------------------------------------------------

    def order(self, request: Request) -> Order:
        key = account(request)
        return key[1], self._devices[request.modality].charged[key], request.turn

    def sort(self, requests: list[Request]) -> None:
        """Sort by `order`."""
        if len({r.tenant for r in requests}) > 1 or max(r.priority for r in requests) > PRIORITY:
            requests.sort(key=self.order)
            return
        requests.sort(key=_URGENCY)  # of one account, as most are: by turn alone
        requests.sort(key=_AGED, reverse=True)

    def behind(self, request: Request, leader: Request) -> bool:
        """Return whether a request may not be put before the leader."""
        if request.priority > leader.priority:
            return True
        return request.tenant != leader.tenant and self.order(request)[:2] > self.order(leader)[:2]

    def preemption_victim(self, request: Request, running: Mapping[str, Request]) -> Request | None:
        """The request that is to wait again for this one: the least urgent of the tenant that holds the most places."""
        counts = Counter(other.tenant for other in running.values())
        fair, waits = counts[request.tenant] + 1, account(request)[1]
        more = [r for r in running.values() if counts[r.tenant] > fair and not r.in_flight and account(r)[1] >= waits]
        return max(more, key=lambda r: (counts[r.tenant], self.order(r)), default=None)

    def yields(self, request: Request) -> bool:
        """Return whether another tenant's request that runs on the device, on whatever lane, is to have it first."""
        device, key = self._devices[request.modality], account(request)
        charged = key[1], device.charged[key]
        return any(other[0] != key[0] and (other[1], device.charged[other]) < charged for other in device.running)

    def joining(self, runner: Runner, group: Hashable, requests: Sequence[Request]) -> list[Request]:
        """The requests that could share an iteration: the first one's tenant's, then those of others that may join.

        With others of as many tenants, each of which would have its turn otherwise, it takes at most that many times as
        long as without them; and nobody joins who is further ahead of the first one than that. Where they make next to
        no difference all may, and what may wait only there.
        """
        tenant = requests[0].tenant
        joined = [request for request in requests if request.tenant == tenant]
        if len(joined) == len(requests):
            return joined
        leader = account(requests[0])
        candidates = [(request, account(request)) for request in requests if request.tenant != tenant]
        rows = sum(map(runner.rows, joined))
        alone_s = paid_s = runner.cost(group, rows)
        charged = self._devices[runner.modality].charged
        ahead = {owner: charged[owner] - charged[leader] for owner in {owner for _, owner in candidates}}
        most_s = alone_s * len({tenant} | {owner[0] for owner in ahead if owner[1] <= leader[1]})
        for request, owner in candidates:
            more = rows + runner.rows(request)
            wide_s = runner.cost(group, more)
            if wide_s > _BESIDE * alone_s:
                if owner[1] > leader[1] or wide_s > most_s or ahead[owner] + wide_s - paid_s > most_s:
                    continue
                ahead[owner] += wide_s - paid_s
            joined.append(request)
            rows, paid_s = more, wide_s
        return joined


def _decrement(counter: Counter[Account], key: Account) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
