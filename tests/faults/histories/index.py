"""Indexes a history's calls for the rules that check it."""

from __future__ import annotations

from collections import defaultdict

from tests.faults.histories.record import OK, REFUSED, Call, History, Seen

SUBMIT, ERASE, CANCEL, FINALLY = "submit", "erase", "cancel", "finally"
Job = tuple[str, float, str]  # id, when it was made, and the tenant to whom it was shown: tenants may choose equal ids


class Index:
    """A history as the rules look at it."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.calls = sorted(history.calls, key=lambda call: call.begin)
        self.submits = [call for call in self.calls if call.op == SUBMIT]
        self.accepted: dict[Job, Call] = {}  # the first answer that says so
        self.seen: dict[Job, list[tuple[Call, Seen]]] = defaultdict(list)
        self.erases: dict[tuple[str, str], list[Call]] = defaultdict(list)  # by tenant and id
        for call in self.calls:
            if call.op == SUBMIT and call.outcome == OK:
                self.accepted.setdefault(job_of(call, call.seen[0]), call)
            if call.op == ERASE and call.outcome != REFUSED:
                self.erases[call.tenant, call.about].append(call)
            shown = [*call.seen, *(told.job for told in call.told if told.job is not None)]
            for seen in shown:
                self.seen[job_of(call, seen)].append((call, seen))
        self.finally_ = {(call.tenant, call.about): call for call in self.calls if call.op == FINALLY}

    def erased(self, call: Call, job: Job) -> bool:
        """Whether an accepted job's owner may have erased it since."""
        return any(erase.end >= call.begin for erase in self.erases[call.tenant, job[0]])


def job_of(call: Call, seen: Seen) -> Job:
    return seen.id, seen.created, call.tenant
