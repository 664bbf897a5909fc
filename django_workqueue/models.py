"""
The tables. An item's body is a `QueueItem`; where it stands is the one place that has a
row for it: `Ready`, `Waiting`, `Lease`, `DeadLetter` or `Finished`.

Only `managers` moves items between places. No foreign-key constraint joins the tables:
each move is one statement that keeps the rule, `workqueue doctor` proves it, and the
constraints would cost a fifth of the speed.
"""

from __future__ import annotations

from typing import Any, Final

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_workqueue.failures import FailureKind
from django_workqueue.fields import (
    ExactJSONField,
    KeyField,
    LimitField,
    MomentField,
    SecondsField,
)
from django_workqueue.items import (
    MAX_DEPLOYMENT_LENGTH,
    MAX_HANDLER_LENGTH,
    MAX_ID_LENGTH,
    MAX_KEY_LENGTH,
    MAX_QUEUE_LENGTH,
    MAX_TENANT_LENGTH,
    MAX_WORKER_LENGTH,
    WorkState,
)
from django_workqueue.managers import BodyManager, ClaimManager, QueueItemManager


def _queue() -> KeyField:
    return KeyField(_("queue"), max_length=MAX_QUEUE_LENGTH)


def _deployment() -> KeyField:
    return KeyField(_("deployment"), max_length=MAX_DEPLOYMENT_LENGTH, blank=True, default="")


def _tenant() -> KeyField:
    return KeyField(_("tenant"), max_length=MAX_TENANT_LENGTH)


def _fence() -> models.BigIntegerField[Any, Any]:
    return models.BigIntegerField(default=0, help_text=_("Number of the latest claim."))


def _attempts() -> models.IntegerField[Any, Any]:
    return models.IntegerField(default=0, help_text=_("Executions that ended without success."))


def _enqueued_at() -> models.DateTimeField[Any, Any]:
    # The body's, kept again: the oldest age is read without the bodies.
    return models.DateTimeField()


def _settled_by() -> models.CharField[Any, Any]:
    # Who put the item there by ending a claim: by it a repetition of that is known for one.
    return models.CharField(max_length=MAX_WORKER_LENGTH, blank=True, default="")


def _place_of_item(name: str) -> models.OneToOneField[Any, Any]:
    return models.OneToOneField(
        "QueueItem",
        models.DO_NOTHING,
        primary_key=True,
        db_constraint=False,
        db_column="item",
        related_name=name,
    )


class QueueItem(models.Model):
    """
    The body of an item: what was accepted. Only retention deletes it, only an operator's
    moves change it; its row is their mutex.

    `id` is the public job id and, within a tenant's priority, the order of age.
    """

    id = models.BigAutoField(primary_key=True)
    tenant = _tenant()
    item_id = KeyField(_("item id"), max_length=MAX_ID_LENGTH)
    queue = _queue()
    deployment_id = _deployment()
    handler = KeyField(max_length=MAX_HANDLER_LENGTH, blank=True, default="")
    payload = ExactJSONField(default=dict)
    priority = models.SmallIntegerField(default=0, help_text=_("Higher is served first."))
    dedupe_key = KeyField(_("dedupe key"), max_length=MAX_KEY_LENGTH, null=True, blank=True)
    max_attempts = LimitField()
    lease_seconds = SecondsField()
    max_lease_seconds = SecondsField()
    timeout_seconds = SecondsField(null=True)
    backoff_seconds = SecondsField()
    backoff_cap_seconds = SecondsField()
    retention_seconds = SecondsField(null=True)
    dead_letter_retention_seconds = SecondsField(null=True)
    enqueued_at = MomentField()
    available_at = MomentField(help_text=_("As accepted: not before this time."))
    created_at = MomentField(db_default=Now(), editable=False)
    # True once another acceptance, mostly a newer one, has taken the id, or the key.
    id_freed = models.BooleanField(default=False)
    key_freed = models.BooleanField(default=False)

    objects = QueueItemManager()
    bodies = BodyManager()

    class Meta:
        verbose_name = _("item")
        permissions = [
            ("view_payload", _("Can read payloads and tracebacks")),
            ("requeue", _("Can requeue and resume items")),
            ("edit_payload", _("Can edit payloads")),
            ("cancel", _("Can cancel items")),
            ("discard", _("Can discard dead letters")),
            ("hold", _("Can hold queues and tenants")),
        ]
        constraints = [
            models.UniqueConstraint(
                name="wq_one_holder_of_an_id",
                fields=["tenant", "item_id"],
                condition=Q(id_freed=False),
            ),
            models.UniqueConstraint(
                name="wq_one_holder_of_a_key",
                fields=["tenant", "dedupe_key"],
                condition=Q(key_freed=False, dedupe_key__isnull=False),
            ),
            models.CheckConstraint(
                name="wq_item_names_are_not_empty",
                condition=~Q(tenant="") & ~Q(item_id="") & ~Q(queue=""),
            ),
            models.CheckConstraint(
                name="wq_item_may_run_at_least_once", condition=Q(max_attempts__gte=1)
            ),
            models.CheckConstraint(
                name="wq_item_priority_in_range", condition=Q(priority__range=(-100, 100))
            ),
            models.CheckConstraint(
                name="wq_item_lease_is_positive",
                condition=Q(lease_seconds__gt=0, max_lease_seconds__gt=0),
            ),
        ]
        indexes = [
            # Retention hands an id on to the newest other acceptance.
            models.Index(
                name="wq_older_acceptances",
                fields=["tenant", "item_id"],
                condition=Q(id_freed=True),
            ),
        ]

    def __str__(self) -> str:
        return str(self.item_id)


class Ready(models.Model):
    """
    A row per item that is claimable now. Narrow, with a single index: the primary key is
    the order in which a claim walks from tenant to tenant.

    `rank` is minus the priority, so that one ascending index serves the best first.
    """

    pk = models.CompositePrimaryKey("queue", "deployment_id", "tenant", "rank", "item_id")
    queue = _queue()
    deployment_id = _deployment()
    tenant = _tenant()
    rank = models.SmallIntegerField()
    item = models.ForeignKey(
        QueueItem,
        models.DO_NOTHING,
        db_index=False,
        db_constraint=False,
        db_column="item",
        related_name="+",
    )
    fence = _fence()
    attempts = _attempts()
    settled_by = _settled_by()
    enqueued_at = _enqueued_at()

    class Meta:
        verbose_name = _("ready item")


class Waiting(models.Model):
    """A row per item that is due later, or paused (`due_at` null)."""

    class Cause(models.TextChoices):
        """Why an item waits."""

        SCHEDULED = "scheduled", _("scheduled")
        BACKOFF = "backoff", _("backing off")
        RELEASED = "released", _("released with a delay")
        UNKNOWN_HANDLER = "unknown_handler", _("no worker knew its handler")
        PAUSED = "paused", _("paused")

    item = _place_of_item("waiting")
    queue = _queue()
    deployment_id = _deployment()
    tenant = _tenant()
    rank = models.SmallIntegerField()
    fence = _fence()
    attempts = _attempts()
    settled_by = _settled_by()
    enqueued_at = _enqueued_at()
    due_at = models.DateTimeField(null=True)
    since = models.DateTimeField()
    cause = models.CharField(max_length=15, choices=Cause)

    class Meta:
        verbose_name = _("waiting item")
        indexes = [
            models.Index(name="wq_waiting_by_due_time", fields=["queue", "due_at"]),
            models.Index(
                name="wq_waiting_for_a_handler",
                fields=["queue", "since"],
                condition=Q(cause="unknown_handler"),
            ),
        ]
        constraints = [
            models.CheckConstraint(
                name="wq_waiting_without_due_iff_paused",
                condition=Q(cause="paused", due_at__isnull=True)
                | (~Q(cause="paused") & Q(due_at__isnull=False)),
            ),
        ]


class Lease(models.Model):
    """
    A row per item that a worker holds. Whoever deletes it settles the item.

    `expires_at` has no index, so that renewals stay cheap (HOT) updates; the reaper reads
    the whole table, which is as large as what is in flight.
    """

    item = _place_of_item("lease")
    queue = _queue()
    deployment_id = _deployment()
    tenant = _tenant()
    rank = models.SmallIntegerField()
    fence = _fence()
    attempts = _attempts()
    max_attempts = models.IntegerField()
    enqueued_at = _enqueued_at()
    lease_seconds = models.FloatField()
    worker = KeyField(_("worker"), max_length=MAX_WORKER_LENGTH)
    # Which start of the worker, and which of its processes; empty for a caller of claim().
    boot = models.CharField(max_length=36, blank=True, default="")
    process = models.IntegerField(default=0)
    claimed_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    renewable_until = models.DateTimeField()
    cancel_requested = models.BooleanField(default=False)

    objects = models.Manager()
    claims = ClaimManager()

    class Meta:
        verbose_name = _("lease")
        constraints = [
            models.CheckConstraint(name="wq_lease_has_a_worker", condition=~Q(worker="")),
            models.CheckConstraint(
                name="wq_lease_ends_by_its_cap", condition=Q(expires_at__lte=F("renewable_until"))
            ),
        ]


class DeadLetter(models.Model):
    """A row per item that was given up, until an operator requeues or discards it."""

    class Reason(models.TextChoices):
        """Why an item was given up."""

        EXHAUSTED = "exhausted", _("no attempt left")
        REJECTED = "rejected", _("can't succeed by repeating")

    item = _place_of_item("dead_letter")
    tenant = _tenant()
    queue = _queue()
    deployment_id = _deployment()
    fence = _fence()
    attempts = _attempts()
    dead_at = models.DateTimeField()
    keep_until = models.DateTimeField(null=True, help_text=_("Empty: until an operator acts."))
    settled_by = _settled_by()
    reason = models.CharField(max_length=9, choices=Reason)
    error_class = models.CharField(max_length=200, blank=True, default="")
    fingerprint = models.CharField(max_length=16, blank=True, default="")

    class Meta:
        verbose_name = _("dead letter")
        indexes = [
            models.Index(name="wq_dead_by_tenant", fields=["tenant", "dead_at"]),
            models.Index(name="wq_dead_by_fingerprint", fields=["fingerprint", "dead_at"]),
            models.Index(name="wq_dead_by_time", fields=["dead_at"]),
            models.Index(
                name="wq_dead_to_prune",
                fields=["keep_until", "item"],
                condition=Q(keep_until__isnull=False),
            ),
        ]


class Finished(models.Model):
    """A row per completed or cancelled item, until retention takes it."""

    item = _place_of_item("finished")
    queue = _queue()
    tenant = _tenant()
    state = models.CharField(
        max_length=9, choices=[("completed", _("completed")), ("cancelled", _("cancelled"))]
    )
    fence = _fence()
    attempts = _attempts()
    worker = models.CharField(max_length=MAX_WORKER_LENGTH, blank=True, default="")
    claimed_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField()
    keep_until = models.DateTimeField(null=True)
    result = ExactJSONField(null=True)
    reason = models.TextField(blank=True, default="")

    class Meta:
        verbose_name = _("finished item")
        verbose_name_plural = _("finished items")
        indexes = [models.Index(name="wq_finished_to_prune", fields=["keep_until", "item"])]
        constraints = [
            models.CheckConstraint(
                name="wq_finished_is_completed_or_cancelled",
                condition=Q(state__in=[WorkState.COMPLETED.value, WorkState.CANCELLED.value]),
            ),
        ]


class Failure(models.Model):
    """One counted attempt that ended without success. Append-only."""

    item = models.ForeignKey(
        QueueItem,
        models.DO_NOTHING,
        db_index=False,
        db_constraint=False,
        db_column="item",
        related_name="failures",
    )
    number = models.IntegerField(help_text=_("Of the counted attempt, from 1."))
    fence = _fence()
    kind = models.CharField(
        max_length=11, choices=[(kind.value, kind.value) for kind in FailureKind]
    )
    # Where this failure put the item: by it a repeated report is known for one.
    outcome = models.CharField(max_length=13)
    error_class = models.CharField(max_length=200, blank=True, default="")
    message = models.TextField()
    traceback = models.TextField(blank=True, default="")
    fingerprint = models.CharField(max_length=16, blank=True, default="")
    worker = models.CharField(max_length=MAX_WORKER_LENGTH, blank=True, default="")
    claimed_at = models.DateTimeField(null=True)
    failed_at = models.DateTimeField()

    class Meta:
        verbose_name = _("failure")
        constraints = [
            models.UniqueConstraint(name="wq_one_failure_per_attempt", fields=["item", "number"]),
        ]
        indexes = [models.Index(name="wq_failures_by_time", fields=["failed_at"])]


class Turn(models.Model):
    """
    The rotation's cursor as a log per queue and worker deployment: newest number wins.

    Appending is compare-and-set without a lock: a claim that read number n appends n + 1,
    so a slow claim's entry is not the newest and is ignored.
    """

    # Claims that write the same number have not served the same item.
    pk = models.CompositePrimaryKey("queue", "deployment_id", "number", "item")
    queue = _queue()
    deployment_id = _deployment()
    number = models.BigIntegerField()
    item = models.BigIntegerField(help_text=_("Job id of the item served last."))
    tenant = _tenant()

    class Meta:
        verbose_name = _("turn")


class Counter(models.Model):
    """
    Counts per queue, appended as a delta by the very statement that moves items.

    Reading sums the rows of a queue; upkeep folds them. No row is ever contended.
    """

    queue = _queue()
    ready = models.BigIntegerField(default=0, db_default=0)
    waiting = models.BigIntegerField(default=0, db_default=0)
    claimed = models.BigIntegerField(default=0, db_default=0)
    paused = models.BigIntegerField(default=0, db_default=0)
    dead_lettered = models.BigIntegerField(default=0, db_default=0)
    completed = models.BigIntegerField(default=0, db_default=0)
    cancelled = models.BigIntegerField(default=0, db_default=0)
    reaped = models.BigIntegerField(default=0, db_default=0)
    duplicates_suppressed = models.BigIntegerField(default=0, db_default=0)
    # Attempts that ended so, ever; `completed` falls when retention takes items.
    completions = models.BigIntegerField(default=0, db_default=0)
    failures = models.BigIntegerField(default=0, db_default=0)

    class Meta:
        verbose_name = _("counter")


#: The names of all figures of a `Counter`.
COUNTED: Final = tuple(
    field.name for field in Counter._meta.concrete_fields if field.name not in ("id", "queue")
)


class WorkerProcess(models.Model):
    """Presence of one running worker: a supervisor and its processes."""

    boot = models.CharField(primary_key=True, max_length=36)
    name = KeyField(_("worker"), max_length=MAX_WORKER_LENGTH)
    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    state = models.CharField(
        max_length=8,
        choices=[("running", _("running")), ("draining", _("draining"))],
        default="running",
    )
    version = models.CharField(max_length=50, blank=True, default="")
    queues = models.JSONField(default=list)
    deployment_id = _deployment()
    settings = models.JSONField(default=dict)
    started_at = models.DateTimeField()
    seen_at = models.DateTimeField()

    class Meta:
        verbose_name = _("worker")
        indexes = [models.Index(name="wq_workers_by_name", fields=["name"])]


class Hold(models.Model):
    """A queue, a tenant, or a tenant in a queue, that an operator has stopped serving."""

    # Empty: all queues, or all tenants; never both.
    queue = KeyField(_("queue"), max_length=MAX_QUEUE_LENGTH, blank=True, default="")
    tenant = KeyField(_("tenant"), max_length=MAX_TENANT_LENGTH, blank=True, default="")
    since = models.DateTimeField(db_default=Now())
    actor = models.CharField(max_length=200, blank=True, default="")
    reason = models.TextField(blank=True, default="")

    class Meta:
        verbose_name = _("hold")
        constraints = [
            models.UniqueConstraint(name="wq_one_hold_of_a_kind", fields=["queue", "tenant"]),
            models.CheckConstraint(
                name="wq_hold_names_a_queue_or_a_tenant",
                condition=~Q(queue="") | ~Q(tenant=""),
            ),
        ]


class AuditEntry(models.Model):
    """Who did what to which item, queue or tenant, and why. Append-only."""

    at = models.DateTimeField(db_default=Now())
    actor = models.CharField(max_length=200, blank=True, default="")
    verb = models.CharField(max_length=30)
    queue = KeyField(_("queue"), max_length=MAX_QUEUE_LENGTH, blank=True, default="")
    tenant = KeyField(_("tenant"), max_length=MAX_TENANT_LENGTH, blank=True, default="")
    item = models.BigIntegerField(null=True, help_text=_("Job id."))
    item_id = models.CharField(max_length=MAX_ID_LENGTH, blank=True, default="")
    reason = models.TextField(blank=True, default="")
    detail = models.JSONField(default=dict)

    class Meta:
        verbose_name = _("audit entry")
        verbose_name_plural = _("audit entries")
        indexes = [
            models.Index(name="wq_audit_by_time", fields=["at"]),
            models.Index(name="wq_audit_by_item", fields=["item"]),
        ]


class Sample(models.Model):
    """Figures of a queue at one minute, for charts."""

    queue = _queue()
    at = models.DateTimeField()
    depth = models.BigIntegerField(default=0)
    claimed = models.BigIntegerField(default=0)
    dead_lettered = models.BigIntegerField(default=0)
    completions = models.BigIntegerField(
        default=0, help_text=_("All so far; two samples differ by what ended between.")
    )
    failures = models.BigIntegerField(default=0, help_text=_("Failed attempts, all so far."))
    oldest_age_seconds = models.FloatField(default=0.0)

    class Meta:
        verbose_name = _("sample")
        constraints = [
            models.UniqueConstraint(name="wq_one_sample_a_minute", fields=["at", "queue"]),
        ]
