"""All tables. May be rewritten until the first release."""

import django.db.models.deletion
import django.db.models.functions.datetime
from django.db import migrations, models

import django_workqueue.fields

# Tables whose rows come and go: vacuum by number, not by share, so that a claim never walks
# over many dead rows. `fillfactor` leaves room for renewals as HOT updates.
STORAGE = {
    "ready": "autovacuum_vacuum_threshold = 20000, autovacuum_analyze_threshold = 200000, "
    "autovacuum_analyze_scale_factor = 0",
    "waiting": "autovacuum_vacuum_threshold = 20000",
    "lease": "autovacuum_vacuum_threshold = 10000, fillfactor = 60",
    "turn": "autovacuum_vacuum_threshold = 5000",
    "counter": "autovacuum_vacuum_threshold = 5000",
}


def set_storage_parameters(apps, schema_editor):
    if schema_editor.connection.vendor != "postgresql":
        return
    for table, parameters in STORAGE.items():
        schema_editor.execute(
            f"alter table django_workqueue_{table} set (autovacuum_vacuum_scale_factor = 0, "
            f"autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false, {parameters})"
        )


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="QueueItem",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("tenant", django_workqueue.fields.KeyField(max_length=200, verbose_name="tenant")),
                (
                    "item_id",
                    django_workqueue.fields.KeyField(max_length=200, verbose_name="item id"),
                ),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                (
                    "deployment_id",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="deployment"
                    ),
                ),
                (
                    "handler",
                    django_workqueue.fields.KeyField(blank=True, default="", max_length=200),
                ),
                ("payload", django_workqueue.fields.ExactJSONField(default=dict)),
                (
                    "priority",
                    models.SmallIntegerField(default=0, help_text="Higher is served first."),
                ),
                (
                    "dedupe_key",
                    django_workqueue.fields.KeyField(
                        blank=True, max_length=200, null=True, verbose_name="dedupe key"
                    ),
                ),
                ("max_attempts", django_workqueue.fields.LimitField()),
                ("lease_seconds", django_workqueue.fields.SecondsField()),
                ("max_lease_seconds", django_workqueue.fields.SecondsField()),
                ("timeout_seconds", django_workqueue.fields.SecondsField(null=True)),
                ("backoff_seconds", django_workqueue.fields.SecondsField()),
                ("backoff_cap_seconds", django_workqueue.fields.SecondsField()),
                ("retention_seconds", django_workqueue.fields.SecondsField(null=True)),
                ("dead_letter_retention_seconds", django_workqueue.fields.SecondsField(null=True)),
                ("enqueued_at", django_workqueue.fields.MomentField()),
                (
                    "available_at",
                    django_workqueue.fields.MomentField(
                        help_text="As accepted: not before this time."
                    ),
                ),
                (
                    "created_at",
                    django_workqueue.fields.MomentField(
                        db_default=django.db.models.functions.datetime.Now(), editable=False
                    ),
                ),
                ("id_freed", models.BooleanField(default=False)),
                ("key_freed", models.BooleanField(default=False)),
            ],
            options={
                "verbose_name": "item",
                "permissions": [
                    ("view_payload", "Can read payloads and tracebacks"),
                    ("requeue", "Can requeue and resume items"),
                    ("edit_payload", "Can edit payloads"),
                    ("cancel", "Can cancel items"),
                    ("discard", "Can discard dead letters"),
                    ("hold", "Can hold queues and tenants"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Failure",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "item",
                    models.ForeignKey(
                        db_column="item",
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="failures",
                        to="django_workqueue.queueitem",
                    ),
                ),
                ("number", models.IntegerField(help_text="Of the counted attempt, from 1.")),
                (
                    "fence",
                    models.BigIntegerField(default=0, help_text="Number of the latest claim."),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("error", "error"),
                            ("lapsed", "lapsed"),
                            ("died", "died"),
                            ("restarted", "restarted"),
                            ("shutdown", "shutdown"),
                            ("timeout", "timeout"),
                            ("undecodable", "undecodable"),
                        ],
                        max_length=11,
                    ),
                ),
                ("outcome", models.CharField(max_length=13)),
                ("error_class", models.CharField(blank=True, default="", max_length=200)),
                ("message", models.TextField()),
                ("traceback", models.TextField(blank=True, default="")),
                ("fingerprint", models.CharField(blank=True, default="", max_length=16)),
                ("worker", models.CharField(blank=True, default="", max_length=200)),
                ("claimed_at", models.DateTimeField(null=True)),
                ("failed_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "failure",
            },
        ),
        migrations.CreateModel(
            name="Hold",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "queue",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="queue"
                    ),
                ),
                (
                    "tenant",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=200, verbose_name="tenant"
                    ),
                ),
                (
                    "since",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                ("actor", models.CharField(blank=True, default="", max_length=200)),
                ("reason", models.TextField(blank=True, default="")),
            ],
            options={
                "verbose_name": "hold",
            },
        ),
        migrations.CreateModel(
            name="Ready",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "queue",
                        "deployment_id",
                        "tenant",
                        "rank",
                        "item_id",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                (
                    "deployment_id",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="deployment"
                    ),
                ),
                ("tenant", django_workqueue.fields.KeyField(max_length=200, verbose_name="tenant")),
                ("rank", models.SmallIntegerField()),
                # By hand: the autodetector adds it after the table, and the key then fails.
                (
                    "item",
                    models.ForeignKey(
                        db_column="item",
                        db_constraint=False,
                        db_index=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="+",
                        to="django_workqueue.queueitem",
                    ),
                ),
                (
                    "fence",
                    models.BigIntegerField(default=0, help_text="Number of the latest claim."),
                ),
                (
                    "attempts",
                    models.IntegerField(
                        default=0, help_text="Executions that ended without success."
                    ),
                ),
                ("settled_by", models.CharField(blank=True, default="", max_length=200)),
                ("enqueued_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "ready item",
            },
        ),
        migrations.CreateModel(
            name="Sample",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                ("at", models.DateTimeField()),
                ("depth", models.BigIntegerField(default=0)),
                ("claimed", models.BigIntegerField(default=0)),
                ("dead_lettered", models.BigIntegerField(default=0)),
                (
                    "completions",
                    models.BigIntegerField(
                        default=0,
                        help_text="All so far; two samples differ by what ended between.",
                    ),
                ),
                (
                    "failures",
                    models.BigIntegerField(default=0, help_text="Failed attempts, all so far."),
                ),
                ("oldest_age_seconds", models.FloatField(default=0.0)),
            ],
            options={
                "verbose_name": "sample",
            },
        ),
        migrations.CreateModel(
            name="Turn",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "queue",
                        "deployment_id",
                        "number",
                        "item",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                (
                    "deployment_id",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="deployment"
                    ),
                ),
                ("number", models.BigIntegerField()),
                ("item", models.BigIntegerField(help_text="Job id of the item served last.")),
                ("tenant", django_workqueue.fields.KeyField(max_length=200, verbose_name="tenant")),
            ],
            options={
                "verbose_name": "turn",
            },
        ),
        migrations.CreateModel(
            name="WorkerProcess",
            fields=[
                ("boot", models.CharField(max_length=36, primary_key=True, serialize=False)),
                ("name", django_workqueue.fields.KeyField(max_length=200, verbose_name="worker")),
                ("host", models.CharField(max_length=255)),
                ("pid", models.IntegerField()),
                (
                    "state",
                    models.CharField(
                        choices=[("running", "running"), ("draining", "draining")],
                        default="running",
                        max_length=8,
                    ),
                ),
                ("version", models.CharField(blank=True, default="", max_length=50)),
                ("queues", models.JSONField(default=list)),
                (
                    "deployment_id",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="deployment"
                    ),
                ),
                ("settings", models.JSONField(default=dict)),
                ("started_at", models.DateTimeField()),
                ("seen_at", models.DateTimeField()),
            ],
            options={
                "verbose_name": "worker",
            },
        ),
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "at",
                    models.DateTimeField(db_default=django.db.models.functions.datetime.Now()),
                ),
                ("actor", models.CharField(blank=True, default="", max_length=200)),
                ("verb", models.CharField(max_length=30)),
                (
                    "queue",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="queue"
                    ),
                ),
                (
                    "tenant",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=200, verbose_name="tenant"
                    ),
                ),
                ("item", models.BigIntegerField(help_text="Job id.", null=True)),
                ("item_id", models.CharField(blank=True, default="", max_length=200)),
                ("reason", models.TextField(blank=True, default="")),
                ("detail", models.JSONField(default=dict)),
            ],
            options={
                "verbose_name": "audit entry",
                "verbose_name_plural": "audit entries",
                "indexes": [
                    models.Index(fields=["at"], name="wq_audit_by_time"),
                    models.Index(fields=["item"], name="wq_audit_by_item"),
                ],
            },
        ),
        migrations.CreateModel(
            name="Counter",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                ("ready", models.BigIntegerField(db_default=0, default=0)),
                ("waiting", models.BigIntegerField(db_default=0, default=0)),
                ("claimed", models.BigIntegerField(db_default=0, default=0)),
                ("paused", models.BigIntegerField(db_default=0, default=0)),
                ("dead_lettered", models.BigIntegerField(db_default=0, default=0)),
                ("completed", models.BigIntegerField(db_default=0, default=0)),
                ("cancelled", models.BigIntegerField(db_default=0, default=0)),
                ("reaped", models.BigIntegerField(db_default=0, default=0)),
                ("duplicates_suppressed", models.BigIntegerField(db_default=0, default=0)),
                ("completions", models.BigIntegerField(db_default=0, default=0)),
                ("failures", models.BigIntegerField(db_default=0, default=0)),
            ],
            options={
                "verbose_name": "counter",
            },
        ),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[
                (
                    "item",
                    models.OneToOneField(
                        db_column="item",
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        primary_key=True,
                        related_name="dead_letter",
                        serialize=False,
                        to="django_workqueue.queueitem",
                    ),
                ),
                ("tenant", django_workqueue.fields.KeyField(max_length=200, verbose_name="tenant")),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                (
                    "deployment_id",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="deployment"
                    ),
                ),
                (
                    "fence",
                    models.BigIntegerField(default=0, help_text="Number of the latest claim."),
                ),
                (
                    "attempts",
                    models.IntegerField(
                        default=0, help_text="Executions that ended without success."
                    ),
                ),
                ("dead_at", models.DateTimeField()),
                (
                    "keep_until",
                    models.DateTimeField(help_text="Empty: until an operator acts.", null=True),
                ),
                ("settled_by", models.CharField(blank=True, default="", max_length=200)),
                (
                    "reason",
                    models.CharField(
                        choices=[
                            ("exhausted", "no attempt left"),
                            ("rejected", "can't succeed by repeating"),
                        ],
                        max_length=9,
                    ),
                ),
                ("error_class", models.CharField(blank=True, default="", max_length=200)),
                ("fingerprint", models.CharField(blank=True, default="", max_length=16)),
            ],
            options={
                "verbose_name": "dead letter",
            },
        ),
        migrations.CreateModel(
            name="Finished",
            fields=[
                (
                    "item",
                    models.OneToOneField(
                        db_column="item",
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        primary_key=True,
                        related_name="finished",
                        serialize=False,
                        to="django_workqueue.queueitem",
                    ),
                ),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                ("tenant", django_workqueue.fields.KeyField(max_length=200, verbose_name="tenant")),
                (
                    "state",
                    models.CharField(
                        choices=[("completed", "completed"), ("cancelled", "cancelled")],
                        max_length=9,
                    ),
                ),
                (
                    "fence",
                    models.BigIntegerField(default=0, help_text="Number of the latest claim."),
                ),
                (
                    "attempts",
                    models.IntegerField(
                        default=0, help_text="Executions that ended without success."
                    ),
                ),
                ("worker", models.CharField(blank=True, default="", max_length=200)),
                ("claimed_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField()),
                ("keep_until", models.DateTimeField(null=True)),
                ("result", django_workqueue.fields.ExactJSONField(null=True)),
                ("reason", models.TextField(blank=True, default="")),
            ],
            options={
                "verbose_name": "finished item",
                "verbose_name_plural": "finished items",
            },
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[
                (
                    "item",
                    models.OneToOneField(
                        db_column="item",
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        primary_key=True,
                        related_name="lease",
                        serialize=False,
                        to="django_workqueue.queueitem",
                    ),
                ),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                (
                    "deployment_id",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="deployment"
                    ),
                ),
                ("tenant", django_workqueue.fields.KeyField(max_length=200, verbose_name="tenant")),
                ("rank", models.SmallIntegerField()),
                (
                    "fence",
                    models.BigIntegerField(default=0, help_text="Number of the latest claim."),
                ),
                (
                    "attempts",
                    models.IntegerField(
                        default=0, help_text="Executions that ended without success."
                    ),
                ),
                ("max_attempts", models.IntegerField()),
                ("enqueued_at", models.DateTimeField()),
                ("lease_seconds", models.FloatField()),
                ("worker", django_workqueue.fields.KeyField(max_length=200, verbose_name="worker")),
                ("boot", models.CharField(blank=True, default="", max_length=36)),
                ("process", models.IntegerField(default=0)),
                ("claimed_at", models.DateTimeField()),
                ("expires_at", models.DateTimeField()),
                ("renewable_until", models.DateTimeField()),
                ("cancel_requested", models.BooleanField(default=False)),
            ],
            options={
                "verbose_name": "lease",
            },
        ),
        migrations.CreateModel(
            name="Waiting",
            fields=[
                (
                    "item",
                    models.OneToOneField(
                        db_column="item",
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        primary_key=True,
                        related_name="waiting",
                        serialize=False,
                        to="django_workqueue.queueitem",
                    ),
                ),
                ("queue", django_workqueue.fields.KeyField(max_length=100, verbose_name="queue")),
                (
                    "deployment_id",
                    django_workqueue.fields.KeyField(
                        blank=True, default="", max_length=100, verbose_name="deployment"
                    ),
                ),
                ("tenant", django_workqueue.fields.KeyField(max_length=200, verbose_name="tenant")),
                ("rank", models.SmallIntegerField()),
                (
                    "fence",
                    models.BigIntegerField(default=0, help_text="Number of the latest claim."),
                ),
                (
                    "attempts",
                    models.IntegerField(
                        default=0, help_text="Executions that ended without success."
                    ),
                ),
                ("settled_by", models.CharField(blank=True, default="", max_length=200)),
                ("enqueued_at", models.DateTimeField()),
                ("due_at", models.DateTimeField(null=True)),
                ("since", models.DateTimeField()),
                (
                    "cause",
                    models.CharField(
                        choices=[
                            ("scheduled", "scheduled"),
                            ("backoff", "backing off"),
                            ("released", "released with a delay"),
                            ("unknown_handler", "no worker knew its handler"),
                            ("paused", "paused"),
                        ],
                        max_length=15,
                    ),
                ),
            ],
            options={
                "verbose_name": "waiting item",
            },
        ),
        migrations.AddIndex(
            model_name="queueitem",
            index=models.Index(
                condition=models.Q(("id_freed", True)),
                fields=["tenant", "item_id"],
                name="wq_older_acceptances",
            ),
        ),
        migrations.AddConstraint(
            model_name="queueitem",
            constraint=models.UniqueConstraint(
                condition=models.Q(("id_freed", False)),
                fields=("tenant", "item_id"),
                name="wq_one_holder_of_an_id",
            ),
        ),
        migrations.AddConstraint(
            model_name="queueitem",
            constraint=models.UniqueConstraint(
                condition=models.Q(("dedupe_key__isnull", False), ("key_freed", False)),
                fields=("tenant", "dedupe_key"),
                name="wq_one_holder_of_a_key",
            ),
        ),
        migrations.AddConstraint(
            model_name="queueitem",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("tenant", ""), _negated=True),
                    models.Q(("item_id", ""), _negated=True),
                    models.Q(("queue", ""), _negated=True),
                ),
                name="wq_item_names_are_not_empty",
            ),
        ),
        migrations.AddConstraint(
            model_name="queueitem",
            constraint=models.CheckConstraint(
                condition=models.Q(("max_attempts__gte", 1)), name="wq_item_may_run_at_least_once"
            ),
        ),
        migrations.AddConstraint(
            model_name="queueitem",
            constraint=models.CheckConstraint(
                condition=models.Q(("priority__range", (-100, 100))),
                name="wq_item_priority_in_range",
            ),
        ),
        migrations.AddConstraint(
            model_name="queueitem",
            constraint=models.CheckConstraint(
                condition=models.Q(("lease_seconds__gt", 0), ("max_lease_seconds__gt", 0)),
                name="wq_item_lease_is_positive",
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.UniqueConstraint(
                fields=("queue", "tenant"), name="wq_one_hold_of_a_kind"
            ),
        ),
        migrations.AddConstraint(
            model_name="hold",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("queue", ""), _negated=True),
                    models.Q(("tenant", ""), _negated=True),
                    _connector="OR",
                ),
                name="wq_hold_names_a_queue_or_a_tenant",
            ),
        ),
        migrations.AddConstraint(
            model_name="sample",
            constraint=models.UniqueConstraint(
                fields=("at", "queue"), name="wq_one_sample_a_minute"
            ),
        ),
        migrations.AddIndex(
            model_name="workerprocess",
            index=models.Index(fields=["name"], name="wq_workers_by_name"),
        ),
        migrations.AddIndex(
            model_name="deadletter",
            index=models.Index(fields=["tenant", "dead_at"], name="wq_dead_by_tenant"),
        ),
        migrations.AddIndex(
            model_name="deadletter",
            index=models.Index(fields=["fingerprint", "dead_at"], name="wq_dead_by_fingerprint"),
        ),
        migrations.AddIndex(
            model_name="deadletter",
            index=models.Index(fields=["dead_at"], name="wq_dead_by_time"),
        ),
        migrations.AddIndex(
            model_name="deadletter",
            index=models.Index(
                condition=models.Q(("keep_until__isnull", False)),
                fields=["keep_until", "item"],
                name="wq_dead_to_prune",
            ),
        ),
        migrations.AddIndex(
            model_name="finished",
            index=models.Index(fields=["keep_until", "item"], name="wq_finished_to_prune"),
        ),
        migrations.AddConstraint(
            model_name="finished",
            constraint=models.CheckConstraint(
                condition=models.Q(("state__in", ["completed", "cancelled"])),
                name="wq_finished_is_completed_or_cancelled",
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(("worker", ""), _negated=True), name="wq_lease_has_a_worker"
            ),
        ),
        migrations.AddConstraint(
            model_name="lease",
            constraint=models.CheckConstraint(
                condition=models.Q(("expires_at__lte", models.F("renewable_until"))),
                name="wq_lease_ends_by_its_cap",
            ),
        ),
        migrations.AddIndex(
            model_name="waiting",
            index=models.Index(fields=["queue", "due_at"], name="wq_waiting_by_due_time"),
        ),
        migrations.AddIndex(
            model_name="waiting",
            index=models.Index(
                condition=models.Q(("cause", "unknown_handler")),
                fields=["queue", "since"],
                name="wq_waiting_for_a_handler",
            ),
        ),
        migrations.AddConstraint(
            model_name="waiting",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("cause", "paused"), ("due_at__isnull", True)),
                    models.Q(
                        models.Q(("cause", "paused"), _negated=True), ("due_at__isnull", False)
                    ),
                    _connector="OR",
                ),
                name="wq_waiting_without_due_iff_paused",
            ),
        ),
        migrations.AddIndex(
            model_name="failure",
            index=models.Index(fields=["failed_at"], name="wq_failures_by_time"),
        ),
        migrations.AddConstraint(
            model_name="failure",
            constraint=models.UniqueConstraint(
                fields=("item", "number"), name="wq_one_failure_per_attempt"
            ),
        ),
        migrations.RunPython(set_storage_parameters, migrations.RunPython.noop),
    ]
