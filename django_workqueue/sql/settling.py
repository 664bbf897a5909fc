"""Renewing claims, and ending them by their holders."""

from __future__ import annotations

from typing import Final

from django_workqueue.sql.clock import timed

# SKIP LOCKED: somebody's open transaction on one lease must not stop the others' renewal.
RENEW: Final = timed("""
with told as materialized (
  select *
    from json_to_recordset(%(claims)s::json) as told (item bigint, fence bigint)
), mine as materialized (
  select item
    from django_workqueue_lease lease
   where item = any(array(select item from told))
     and fence = (select fence from told where told.item = lease.item)
     and worker = %(worker)s::text
     and expires_at > {now}
     and renewable_until > {now}
     for update {patience}
)
update django_workqueue_lease
   set expires_at = greatest(
         expires_at,
         least({clock} + interval '1 second' * lease_seconds, renewable_until))
 where item = any(array(select item from mine))
returning item, expires_at, cancel_requested,
          extract(epoch from renewable_until - {clock})::float8 as renewable_for
""")
RENEW_ONE: Final = RENEW.replace("{patience}", "")
RENEW_MANY: Final = RENEW.replace("{patience}", "skip locked")

# Whoever deletes the lease row settles the item: this is the fence. A row that shouldn't be
# where the item goes is left to `workqueue doctor`: it must not abort the batch. Of an item
# that somebody deleted only the lease is left, which goes: nothing else is done, nor answered.
MINE: Final = """
   where item = any(array(select item from told))
     and fence = (select fence from told where told.item = lease.item)
     and worker = %(worker)s::text
     and expires_at > {now}"""

COMPLETE: Final = timed(f"""
with told as materialized (
  select *
    from json_to_recordset(%(settlements)s::json) as told (item bigint, fence bigint, result text)
), gone as (
  delete from django_workqueue_lease lease{MINE}
  returning item, queue, tenant, fence, attempts, worker, claimed_at
), verdict as materialized (
  select gone.*, {{clock}} as now, body.id is null as deleted, body.retention_seconds
    from gone
    left join lateral (
      select id, retention_seconds
        from django_workqueue_queueitem
       where id = gone.item
       limit 1) body on true
), finished as (
  insert into django_workqueue_finished (
         item, queue, tenant, state, fence, attempts, worker, claimed_at,
         finished_at, keep_until, result, reason)
  select item, queue, tenant, 'completed', fence, attempts, worker, claimed_at,
         now, now + interval '1 second' * retention_seconds,
         (select result from told where told.item = verdict.item)::json, ''
    from verdict
   where not deleted
      on conflict do nothing
), counted as (
  insert into django_workqueue_counter (queue, claimed, completed, completions)
  select queue, -count(*), count(*) filter (where not deleted),
         count(*) filter (where not deleted)
    from verdict
   group by queue
)
select item, 'completed' as state
  from verdict
 where not deleted
""")

# Given back, or put aside: of a told cause `paused` the item waits for a person.
RELEASE: Final = timed(f"""
with told as materialized (
  select *
    from json_to_recordset(%(settlements)s::json)
      as told (item bigint, fence bigint, delay float8, cause text)
), gone as (
  delete from django_workqueue_lease lease{MINE}
  returning item, queue, deployment_id, tenant, rank, fence, attempts, worker, claimed_at,
            enqueued_at, cancel_requested
), verdict as materialized (
  select gone.*, told.cause, {{clock}} as now,
         {{clock}} + interval '1 second' * told.delay as due_at,
         case when body.id is null then 'deleted'
              when gone.cancel_requested then 'cancelled'
              when told.cause = 'paused' then 'paused'
              when told.delay > 0 then 'waiting'
              else 'ready'
         end as place,
         body.retention_seconds
    from gone
    join told using (item)
    left join lateral (
      select id, retention_seconds
        from django_workqueue_queueitem
       where id = gone.item
       limit 1) body on true
), ready as (
  insert into django_workqueue_ready (
         queue, deployment_id, tenant, rank, item, fence, attempts, settled_by, enqueued_at)
  select queue, deployment_id, tenant, rank, item, fence, attempts, worker, enqueued_at
    from verdict
   where place = 'ready'
      on conflict do nothing
), waiting as (
  insert into django_workqueue_waiting (
         item, queue, deployment_id, tenant, rank, fence, attempts, settled_by,
         enqueued_at, due_at, since, cause)
  select item, queue, deployment_id, tenant, rank, fence, attempts, worker,
         enqueued_at, case place when 'waiting' then due_at end, now, cause
    from verdict
   where place in ('waiting', 'paused')
      on conflict do nothing
), cancelled as (
  insert into django_workqueue_finished (
         item, queue, tenant, state, fence, attempts, worker, claimed_at,
         finished_at, keep_until, result, reason)
  select item, queue, tenant, 'cancelled', fence, attempts, worker, claimed_at,
         now, now + interval '1 second' * retention_seconds, null, ''
    from verdict
   where place = 'cancelled'
      on conflict do nothing
), counted as (
  insert into django_workqueue_counter (queue, claimed, ready, waiting, paused, cancelled)
  select queue, -count(*), count(*) filter (where place = 'ready'),
         count(*) filter (where place = 'waiting'), count(*) filter (where place = 'paused'),
         count(*) filter (where place = 'cancelled')
    from verdict
   group by queue
)
select item, case when place in ('cancelled', 'paused') then place else 'queued' end as state
  from verdict
 where place <> 'deleted'
""")
