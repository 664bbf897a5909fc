"""
Mends what can be mended safely, each finding in a transaction of its own.

The body's row is the lock, as for every move of operators; an item's places are read in
one statement after it, and their rows locked too, so that no worker moves the item
meanwhile. What is no longer wrong then is left alone. Each repair is in the audit.

No repair loses an item, and none lets an item run that may have ended: where that can't be
known, it goes into the dead letter, and an operator decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from django.db import IntegrityError
from django.db.models import Exists, Max, OuterRef

from django_workqueue import doctor
from django_workqueue.doctor.base import MovedError, RefusedError
from django_workqueue.doctor.findings import Finding, Kind
from django_workqueue.doctor.placing import Placing
from django_workqueue.failures import FailureKind, describe
from django_workqueue.items import WorkState
from django_workqueue.models import (
    AuditEntry,
    Counter,
    DeadLetter,
    Failure,
    Finished,
    QueueItem,
)
from django_workqueue.operating import TRIES
from django_workqueue.reading import ItemReader

VERB: Final = "repair"
#: Findings that are looked for at a time.
BATCH: Final = 500
#: Missing failures of one item that are filled in.
MOST_PLACEHOLDERS: Final = 100
PLACEHOLDER: Final = "the record of this attempt is missing (placeholder by workqueue doctor)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What became of a finding: `done` tells, or `why` it was not repaired."""

    finding: Finding
    done: str = ""
    why: str = ""


def repair(using: str, by: str = "") -> Iterator[Repair]:
    """Repair what is wrong in the database *using*, and tell of each finding. *by*: who asks."""
    return Repairer(using, by).run()


class Repairer(Placing):
    """Makes all repairs, in the order in which one prepares the next."""

    def __init__(self, using: str, by: str) -> None:
        super().__init__(using)
        self._by = by

    def run(self) -> Iterator[Repair]:
        """Repair all, and tell of each."""
        for place in doctor.LEFT:
            body = Exists(QueueItem.objects.filter(pk=OuterRef("item_id")))
            find = partial(doctor.strays, self._using, place, ~body)
            yield from self._each(find, None, self._delete_without_body)
        for place in doctor.KEPT:
            find = partial(doctor.strays, self._using, place, doctor.unlike_body(place))
            yield from self._each(find, None, self._write_as_body)
        in_places = partial(doctor.items_not_in_one_place, self._using)
        for kind, mend in (
            (Kind.SEVERAL_PLACES, self._keep_one_place),
            (Kind.NO_PLACE, self._place),
        ):
            yield from self._each(partial(in_places, kind), 0, mend)
        for find_items, mend in (
            (doctor.live_items_without_their_names, self._take_names_back),
            (doctor.ids_without_a_holder, self._take_id_back),
            (doctor.attempts_without_a_failure, self._agree_on_attempts),
            (doctor.fences_behind, self._raise_fence),
        ):
            yield from self._each(partial(find_items, self._using), 0, mend)
        yield from self._correct_counters()

    def _each(
        self,
        find: Callable[..., Iterable[Finding]],
        after: Any,
        mend: Callable[[Finding], str],
    ) -> Iterator[Repair]:
        """Repair all findings of a kind, some at a time."""
        while found := list(find(after=after, limit=BATCH)):
            for finding in found:
                yield self._repair(finding, mend)
            after = found[-1].cursor

    def _repair(self, finding: Finding, mend: Callable[[Finding], str]) -> Repair:
        """Let *mend* repair the finding in a transaction; again if others moved the item."""
        for _ in range(TRIES):
            try:
                with self._bodies.changing():
                    self._now = self._moves.now()
                    done = mend(finding)
                    if done:
                        self._record(finding, done)
                    return Repair(finding=finding, done=done or "is all right by now")
            except (MovedError, IntegrityError):
                continue
            except RefusedError as error:
                return Repair(finding=finding, why=str(error))
        return Repair(finding=finding, why="others move the item too fast")

    # What is kept twice.

    def _take_names_back(self, finding: Finding) -> str:
        job_id = self._job_id(finding)
        [named] = self._bodies.filter(pk=job_id).values_list("tenant", "item_id", "dedupe_key")
        rivals = [pk for pk in self._bodies.holders([named]) if pk != job_id]
        case = self._case(finding, rivals)
        if {*self._bodies.holders([named])} - {job_id, *rivals}:
            raise MovedError
        body = case.body
        if not body.state or not WorkState(body.state).live:
            return ""
        holders = ItemReader(self._using).rows(rivals)
        for rival in holders:
            if not rival.state or WorkState(rival.state).live:
                raise RefusedError(f"item {rival.pk} has its id or key: cancel one of the two")
        same_id = [rival for rival in holders if rival.item_id == body.item_id]
        self._bodies.set_freed(
            True,
            ids=[rival.pk for rival in same_id],
            keys=[
                rival.pk
                for rival in holders
                if rival.dedupe_key == body.dedupe_key and body.dedupe_key is not None
            ],
        )
        self._bodies.filter(pk=job_id).update(id_freed=False, key_freed=False)
        row = case.only
        fence = max([row.fence, *(rival.fence for rival in same_id)])
        if not self._stands(row) and row.fence < fence:
            self._all(type(row)).filter(pk=row.pk).update(fence=fence)
        return "took its id and its key back"

    def _take_id_back(self, finding: Finding) -> str:
        case = self._case(finding)
        body, row = case.body, case.only
        if self._bodies.holders([(body.tenant, body.item_id, None)]):
            return ""
        self._bodies.set_freed(False, ids=[body.pk], keys=[])
        fence = self._fence_of_namesakes(body)
        if row.fence < fence:
            # What it was settled under is forgotten: nothing is a repetition of that any more.
            settler = {"claimed_at": None} if isinstance(row, Finished) else {"settled_by": ""}
            self._all(type(row)).filter(pk=row.pk).update(fence=fence, **settler)
        return "took its id back"

    def _agree_on_attempts(self, finding: Finding) -> str:
        case = self._case(finding)
        row, job_id = case.only, case.body.pk
        failures = self._all(Failure).filter(item_id=job_id)
        numbers = set(failures.values_list("number", flat=True))
        attempts = max([row.attempts, *numbers])
        if row.attempts < 0 or min([1, *numbers]) < 1:
            raise RefusedError("its attempts or its failures have numbers below the first")
        if attempts - len(numbers) > MOST_PLACEHOLDERS:
            raise RefusedError(f"more than {MOST_PLACEHOLDERS} failures are missing")
        missing = sorted({*range(1, attempts + 1)} - numbers)
        if row.attempts == attempts and not missing:
            return ""
        self._all(type(row)).filter(pk=row.pk).update(attempts=attempts)
        self._all(Failure).bulk_create(
            self._placeholder(case.body, row, number, attempts) for number in missing
        )
        return f"counts {attempts} attempts; placeholders written: {len(missing)}"

    def _placeholder(self, body: Any, row: Any, number: int, attempts: int) -> Failure:
        ended = isinstance(row, DeadLetter) and number == attempts
        outcome = WorkState.DEAD_LETTERED if ended else WorkState.QUEUED
        text = describe(PLACEHOLDER)
        return Failure(
            item_id=body.pk,
            number=number,
            kind=FailureKind.ERROR.value,
            outcome=outcome.value,
            message=text.message,
            fingerprint=text.fingerprint,
            failed_at=row.dead_at if ended else body.created_at,
        )

    def _raise_fence(self, finding: Finding) -> str:
        row = self._case(finding).only
        failures = self._all(Failure).filter(item_id=row.item_id)
        latest = failures.aggregate(latest=Max("fence"))["latest"] or 0
        if row.fence >= latest:
            return ""
        if self._stands(row):
            raise RefusedError(f"worker {row.worker!r} holds it: repair once its claim has ended")
        self._all(type(row)).filter(pk=row.pk).update(fence=latest)
        return f"raised its fence to {latest}"

    def _correct_counters(self) -> Iterator[Repair]:
        """Append what the counters are off by, all in the picture in which it was found."""
        repairs = []
        with doctor.one_picture(self._using), self._bodies.changing():
            for finding in doctor.wrong_counters(self._using):
                self._all(Counter).create(queue=finding.queue, **{finding.figure: -finding.error})
                done = f"corrected {finding.figure} by {-finding.error:+}"
                self._record(finding, done)
                repairs.append(Repair(finding=finding, done=done))
        yield from repairs

    def _record(self, finding: Finding, done: str) -> None:
        self._all(AuditEntry).create(
            at=self._now,
            actor=self._by,
            verb=VERB,
            queue=finding.queue,
            tenant=finding.tenant,
            item=finding.job_id,
            item_id=finding.item_id,
            reason=f"{finding.kind}: {finding.problem}",
            detail={"done": done},
        )
