"""Attempts that end without success, whoever says so."""

from __future__ import annotations

from typing import Final

from django_workqueue.sql.clock import timed
from django_workqueue.sql.settling import MINE

# From `gone`: the deleted leases, and how each attempt ended. Decided from the row itself,
# in the statement that takes it: a picture read earlier may be old.
_ENDED: Final = """
verdict as materialized (
  select gone.*, gone.attempts + 1 as number, moment.now,
         case when body.id is null then 'deleted'   -- by somebody: nothing is left to be done
              when gone.cancel_requested then 'cancelled'
              when not gone.retryable or gone.attempts + 1 >= gone.max_attempts
              then 'dead_lettered'
              else 'queued'
         end as state,
         body.retention_seconds, body.dead_letter_retention_seconds,
         coalesce(gone.delay, body.backoff) as wait
    from (select {clock} as now) moment, gone
    left join lateral (
      select id, retention_seconds, dead_letter_retention_seconds,
             least(backoff_seconds * power(2::float8, least(gone.attempts, 60)),
                   backoff_cap_seconds) as backoff
        from django_workqueue_queueitem
       where id = gone.item
       limit 1) body on true
), failure as (
  insert into django_workqueue_failure (
         item, number, fence, kind, outcome, error_class, message, traceback, fingerprint,
         worker, claimed_at, failed_at)
  select item, number, fence, kind, state, error_class, message, traceback, fingerprint,
         worker, claimed_at, now
    from verdict
   where state <> 'deleted'
      on conflict do nothing
), ready as (
  insert into django_workqueue_ready (
         queue, deployment_id, tenant, rank, item, fence, attempts, settled_by, enqueued_at)
  select queue, deployment_id, tenant, rank, item, fence, number, settled_by, enqueued_at
    from verdict
   where state = 'queued' and wait <= 0
      on conflict do nothing
), waiting as (
  insert into django_workqueue_waiting (
         item, queue, deployment_id, tenant, rank, fence, attempts, settled_by,
         enqueued_at, due_at, since, cause)
  select item, queue, deployment_id, tenant, rank, fence, number, settled_by,
         enqueued_at, now + interval '1 second' * wait, now, 'backoff'
    from verdict
   where state = 'queued' and wait > 0
      on conflict do nothing
), buried as (
  insert into django_workqueue_deadletter (
         item, tenant, queue, deployment_id, fence, attempts, dead_at, keep_until, settled_by,
         reason, error_class, fingerprint)
  select item, tenant, queue, deployment_id, fence, number, now,
         now + interval '1 second' * dead_letter_retention_seconds, settled_by,
         case when retryable then 'exhausted' else 'rejected' end,
         error_class, fingerprint
    from verdict
   where state = 'dead_lettered'
      on conflict do nothing
), cancelled as (
  insert into django_workqueue_finished (
         item, queue, tenant, state, fence, attempts, worker, claimed_at,
         finished_at, keep_until, result, reason)
  select item, queue, tenant, 'cancelled', fence, number, worker, claimed_at,
         now, now + interval '1 second' * retention_seconds, null, ''
    from verdict
   where state = 'cancelled'
      on conflict do nothing
), counted as (
  insert into django_workqueue_counter (
         queue, claimed, failures, ready, waiting, dead_lettered, cancelled, reaped)
  select queue, -count(*), count(*) filter (where state <> 'deleted'),
         count(*) filter (where state = 'queued' and wait <= 0),
         count(*) filter (where state = 'queued' and wait > 0),
         count(*) filter (where state = 'dead_lettered'),
         count(*) filter (where state = 'cancelled'),
         count(*) filter (where kind = 'lapsed' and state <> 'deleted')
    from verdict
   group by queue
)
select item, state
  from verdict
 where state <> 'deleted'
 order by expires_at, item"""

_RETURNING_LEASE: Final = """
  returning lease.item, lease.queue, lease.deployment_id, lease.tenant, lease.rank, lease.fence,
            lease.attempts, lease.max_attempts, lease.worker, lease.claimed_at,
            lease.enqueued_at, lease.expires_at, lease.cancel_requested"""

# The same words for every row of a statement; nobody's settlement that could be repeated.
_TOLD_ONCE: Final = """
            , %(kind)s::text as kind, %(message)s::text as message, '' as error_class,
            '' as traceback, %(fingerprint)s::text as fingerprint, true as retryable,
            %(delay)s::float8 as delay, '' as settled_by"""

FAIL: Final = timed(f"""
with told as materialized (
  select *
    from json_to_recordset(%(settlements)s::json) as told (
           item bigint, fence bigint, kind text, message text, error_class text,
           traceback text, fingerprint text, retryable boolean, delay float8)
), taken as (
  delete from django_workqueue_lease lease{MINE}{_RETURNING_LEASE}
), gone as (
  select taken.*, told.kind, told.message, told.error_class, told.traceback,
         told.fingerprint, told.retryable, told.delay, taken.worker as settled_by
    from taken
    join told using (item)
),{_ENDED}
""")

REAP: Final = timed(f"""
with late as materialized (
  select item
    from django_workqueue_lease
   where expires_at <= {{now}}
   order by expires_at, item
   limit %(limit)s::int
     for update skip locked
), gone as (
  delete from django_workqueue_lease lease
   where item = any(array(select item from late))
     and expires_at <= {{now}}{_RETURNING_LEASE}{_TOLD_ONCE}
),{_ENDED}
""")

# Without a boot to spare, everything of that name; a worker spares itself and its live twins.
ADOPT: Final = timed(f"""
with mine as materialized (
  select item
    from django_workqueue_lease
   where worker = %(worker)s::text
     and boot <> all(%(spare)s::text[])
   order by item
     for update
), gone as (
  delete from django_workqueue_lease lease
   where item = any(array(select item from mine)){_RETURNING_LEASE}{_TOLD_ONCE}
),{_ENDED}
""")
