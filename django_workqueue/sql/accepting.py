"""Accepting items."""

from __future__ import annotations

from typing import Final

from django_workqueue.sql.clock import timed

RESERVE: Final = """
select nextval(pg_get_serial_sequence('django_workqueue_queueitem', 'id')) as id
  from generate_series(1, %(number)s::int)
 order by id
"""

ACCEPT: Final = timed("""
with given as materialized (
  select coalesce(
           given.job_id, nextval(pg_get_serial_sequence('django_workqueue_queueitem', 'id'))
         ) as id,
         {clock} as now,
         given.*
    from json_to_recordset(%(items)s::json) as given (
           place int, job_id bigint, tenant text, item_id text, queue text, deployment_id text,
           handler text, payload text, priority smallint, dedupe_key text, fence bigint,
           max_attempts int, lease_seconds float8, max_lease_seconds float8,
           timeout_seconds float8, backoff_seconds float8, backoff_cap_seconds float8,
           retention_seconds float8, dead_letter_retention_seconds float8,
           enqueued_at timestamptz, available_at timestamptz)
), body as (
  insert into django_workqueue_queueitem (
         id, tenant, item_id, queue, deployment_id, handler, payload, priority, dedupe_key,
         max_attempts, lease_seconds, max_lease_seconds, timeout_seconds,
         backoff_seconds, backoff_cap_seconds,
         retention_seconds, dead_letter_retention_seconds,
         enqueued_at, available_at, created_at, id_freed, key_freed)
  select id, tenant, item_id, queue, deployment_id, handler, payload::json, priority, dedupe_key,
         max_attempts, lease_seconds, max_lease_seconds, timeout_seconds,
         backoff_seconds, backoff_cap_seconds,
         retention_seconds, dead_letter_retention_seconds,
         coalesce(enqueued_at, now), coalesce(available_at, now), now, false, false
    from given
   order by tenant, dedupe_key, item_id   -- two batches wait for each other in one order
      on conflict do nothing              -- the holder of the id or key is looked at next
  returning id, enqueued_at, available_at
), stored as materialized (
  select given.*, body.enqueued_at as accepted_at, body.available_at as due_at,
         body.available_at <= given.now as due
    from body join given using (id)
), ready as (
  insert into django_workqueue_ready (
         queue, deployment_id, tenant, rank, item, fence, attempts, settled_by,
         enqueued_at)
  select queue, deployment_id, tenant, -priority, id, fence, 0, '', accepted_at
    from stored
   where due
), waiting as (
  insert into django_workqueue_waiting (
         item, queue, deployment_id, tenant, rank, fence, attempts, settled_by,
         enqueued_at, due_at, since, cause)
  select id, queue, deployment_id, tenant, -priority, fence, 0, '', accepted_at,
         due_at, now, 'scheduled'
    from stored
   where not due
), counted as (
  insert into django_workqueue_counter (queue, ready, waiting)
  select queue, count(*) filter (where due), count(*) filter (where not due)
    from stored
   group by queue
)
select place, id, accepted_at, due_at
  from stored
""")

COUNT_SUPPRESSED: Final = """
insert into django_workqueue_counter (queue, duplicates_suppressed)
values (%(queue)s, %(number)s)
returning id
"""
