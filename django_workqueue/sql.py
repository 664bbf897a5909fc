"""
The statements that move items between places on PostgreSQL, one clause a line.

Rules that they all keep, each learned by measuring:

- A move is one statement: deleted here, inserted there, counted, in one go.
- No free join to a stored table. A plan made while a table was empty is kept while it
  grows; LATERAL … LIMIT, ``= ANY(array)`` and ctid stay index steps whatever it believed.
- Rows of `Ready` and `Waiting` are never updated, so a locked row's ctid stands still.
  A `Lease` is updated by its renewals: it is addressed by item and fence.
- ``statement_timestamp()`` in predicates: it is stable, so an index may be bounded by it.
  ``clock_timestamp()`` in assigned times: a lease must not lose what a lock wait took.
- Arrays are walked in key order, so two statements lock the same rows in the same order.
"""

from __future__ import annotations

from typing import Final

_CLOCK: Final = {
    "{now}": "(statement_timestamp() + %(skew)s::interval)",
    "{clock}": "(clock_timestamp() + %(skew)s::interval)",
}


def _timed(text: str) -> str:
    for name, fragment in _CLOCK.items():
        text = text.replace(name, fragment)
    return text


NOW: Final = _timed("select {clock} as now")

#: Options of a connection that only claims and settles. Its plans are made once, whatever
#: the tables held then, and are index steps: one made on empty tables is still right when
#: they hold millions of rows.
WORKER_OPTIONS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
}

# ---------------------------------------------------------------- accepting items

RESERVE: Final = """
select nextval(pg_get_serial_sequence('django_workqueue_queueitem', 'id')) as id
  from generate_series(1, %(number)s::int)
 order by id
"""

ACCEPT: Final = _timed("""
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
         queue, deployment_id, tenant, rank, item, fence, attempts, released_by)
  select queue, deployment_id, tenant, -priority, id, fence, 0, ''
    from stored
   where due
), waiting as (
  insert into django_workqueue_waiting (
         item, queue, deployment_id, tenant, rank, fence, attempts, released_by,
         due_at, since, cause)
  select id, queue, deployment_id, tenant, -priority, fence, 0, '', due_at, now, 'scheduled'
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
insert into django_workqueue_counter (queue, duplicates_suppressed) values (%(queue)s, %(number)s)
"""

# ---------------------------------------------------------------- promoting what is due

PROMOTE: Final = _timed("""
with due as materialized (
  select ctid as tid
    from django_workqueue_waiting
   where queue = %(queue)s::text
     and due_at <= {now}
   order by queue, due_at
   limit %(limit)s::int
     for update skip locked
), moved as (
  delete from django_workqueue_waiting
   where ctid = any(array(select tid from due))
  returning queue, deployment_id, tenant, rank, item, fence, attempts, released_by
), ready as (
  insert into django_workqueue_ready (
         queue, deployment_id, tenant, rank, item, fence, attempts, released_by)
  select queue, deployment_id, tenant, rank, item, fence, attempts, released_by
    from moved
), counted as (
  insert into django_workqueue_counter (queue, ready, waiting)
  select %(queue)s::text, count(*), -count(*)
    from moved
  having count(*) > 0
)
select count(*)
  from moved
""")

# ---------------------------------------------------------------- claiming

_BEST_OF_A_LANE: Final = """
      select ctid as tid, tenant, rank, item, fence, attempts
        from django_workqueue_ready
       where queue = %(queue)s::text
         and deployment_id = {lane}
         and {range}
       order by queue, deployment_id, tenant, rank, item
       limit {limit}
         for update skip locked"""

# A branch of a UNION may not lock; a subquery of a branch may.
_BEST_OF_TWO_LANES: Final = """
      select *
        from (select *
                from ({unpinned}
                     ) unpinned
              union all
              select *
                from ({pinned}
                     ) pinned
             ) both_lanes
       order by tenant, rank, item
       limit {limit}"""


def _best(range_: str, *, pinned: bool, limit: str = "1") -> str:
    """
    The best unlocked ready rows in a range of tenants, locked in the same step.

    For a pinned worker, of its own lane and the unpinned one together.
    """

    def lane(name: str) -> str:
        text = _BEST_OF_A_LANE.replace("{lane}", name)
        return text.replace("{range}", range_).replace("{limit}", limit)

    if not pinned:
        return lane("''")
    both = _BEST_OF_TWO_LANES.replace("{unpinned}", lane("''")).replace("{limit}", limit)
    return both.replace("{pinned}", lane("%(deployment_id)s::text"))


_NEWEST_TURN: Final = """
moment as materialized (
  select {clock} as now
), newest as materialized (   -- '' comes before every tenant
  select coalesce(max(number), 0) as number, coalesce(max(tenant), '') as tenant
    from (select number, tenant
            from django_workqueue_turn
           where queue = %(queue)s::text
             and deployment_id = %(deployment_id)s::text
           order by queue, deployment_id, number desc
           limit 1) turn
)"""

# From `pick`: the chosen rows in their order of service (round, pos).
_TAKE: Final = """
turned as (
  insert into django_workqueue_turn (queue, deployment_id, number, tenant)
  select %(queue)s::text, %(deployment_id)s::text, newest.number + 1,
         (select tenant from pick order by round desc, pos desc limit 1)
    from newest
   where exists (select from pick)
), removed as (
  delete from django_workqueue_ready
   where ctid = any(array(select tid from pick))
), claimed as materialized (
  select pick.round, pick.pos, pick.item, pick.tenant, pick.rank, pick.attempts,
         pick.fence + 1 as fence, body.*,
         %(worker)s::text as worker, moment.now as claimed_at,
         moment.now + interval '1 second' * body.max_lease_seconds as renewable_until,
         moment.now + interval '1 second' * body.claim_seconds as expires_at
    from moment, pick
   cross join lateral (
      select item_id, queue, deployment_id, handler, payload::text as payload, priority,
             dedupe_key, max_attempts, timeout_seconds, enqueued_at, available_at,
             max_lease_seconds,
             least(coalesce(%(lease_seconds)s::float8, lease_seconds), max_lease_seconds)
               as claim_seconds
        from django_workqueue_queueitem
       where id = pick.item
       limit 1) body
), leased as (
  insert into django_workqueue_lease (
         item, queue, deployment_id, tenant, rank, fence, attempts, max_attempts,
         lease_seconds, worker, boot, process,
         claimed_at, expires_at, renewable_until, cancel_requested)
  select item, queue, deployment_id, tenant, rank, fence, attempts, max_attempts,
         claim_seconds, worker, %(boot)s::text, %(process)s::int,
         claimed_at, expires_at, renewable_until, false
    from claimed
), counted as (
  insert into django_workqueue_counter (queue, ready, claimed)
  select %(queue)s::text, -count(*), count(*)
    from pick
  having count(*) > 0
)
select claimed.*, newest.number + 1 as turn
  from claimed, newest
 order by round, pos"""


def claim_one(*, pinned: bool) -> str:
    """One item: the next tenant's after the one served last, else the first tenant's."""
    return _timed(f"""
with {_NEWEST_TURN}, pick as materialized (
  select 1 as round, 1 as pos, best.*
    from (select * from ({_best("tenant > (select tenant from newest)", pinned=pinned)}
                        ) ahead
          union all
          select * from ({_best("tenant <= (select tenant from newest)", pinned=pinned)}
                        ) behind
          limit 1) best
), {_TAKE}
""")


def claim_many(*, pinned: bool) -> str:
    """
    A batch: the rotation from the one served last, all the way round, in one walk.

    With fewer tenants than the limit, each gives a quota, equal to one, as the turns would
    give it. A tenant that runs short leaves the batch short: the caller asks again.
    """
    quota = (
        "(%(limit)s::int / tenants.number - 1"
        " + (first.pos <= %(limit)s::int %% tenants.number)::int)"
    )
    rest = _best(
        "tenant = first.tenant and (rank, item) > (first.rank, first.item)",
        pinned=pinned,
        limit=quota,
    )
    return _timed(f"""
with recursive {_NEWEST_TURN}, ahead as (   -- the best of each tenant after the one served last
  select 1 as pos, best.*
    from newest, lateral ({_best("tenant > newest.tenant", pinned=pinned)}
         ) best
  union all
  select ahead.pos + 1, best.*
    from ahead, lateral ({_best("tenant > ahead.tenant", pinned=pinned)}
         ) best
   where ahead.pos < %(limit)s::int
), until_the_end as materialized (
  select count(*)::int as number from ahead
), behind as (   -- and on from the first tenant, up to the one served last
  select until_the_end.number + 1 as pos, best.*
    from until_the_end, newest, lateral ({_best("tenant <= newest.tenant", pinned=pinned)}
         ) best
   where until_the_end.number < %(limit)s::int
  union all
  select behind.pos + 1, best.*
    from behind, newest, lateral ({
        _best("tenant > behind.tenant and tenant <= newest.tenant", pinned=pinned)
    }
         ) best
   where behind.pos < %(limit)s::int
), first as materialized (
  select 1::bigint as round, * from ahead
  union all
  select 1::bigint as round, * from behind
), tenants as materialized (
  select count(*)::int as number from first
), rest as (   -- fewer tenants than the limit: their further rounds
  select 1 + row_number() over (partition by first.pos order by more.rank, more.item) as round,
         first.pos, more.*
    from tenants, first, lateral ({rest}
         ) more
   where tenants.number < %(limit)s::int
), pick as materialized (
  select * from first
  union all
  select * from rest
), {_TAKE}
""")


CLAIM_ONE: Final = {pinned: claim_one(pinned=pinned) for pinned in (False, True)}
CLAIM_MANY: Final = {pinned: claim_many(pinned=pinned) for pinned in (False, True)}

TRIM_TURNS: Final = """
delete from django_workqueue_turn
 where ctid = any(array(
         select ctid
           from django_workqueue_turn
          where queue = %(queue)s::text
            and deployment_id = %(deployment_id)s::text
            and number < %(below)s::bigint
            for update skip locked))
"""

# ---------------------------------------------------------------- renewing

# SKIP LOCKED: somebody's open transaction on one lease must not stop the others' renewal.
RENEW: Final = _timed("""
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
returning item, expires_at, cancel_requested
""")
RENEW_ONE: Final = RENEW.replace("{patience}", "")
RENEW_MANY: Final = RENEW.replace("{patience}", "skip locked")

# ---------------------------------------------------------------- settling

# Whoever deletes the lease row settles the item: this is the fence. A row that shouldn't be
# where the item goes is left to `workqueue doctor`: it must not abort the batch.
_MINE: Final = """
   where item = any(array(select item from told))
     and fence = (select fence from told where told.item = lease.item)
     and worker = %(worker)s::text
     and expires_at > {now}"""

COMPLETE: Final = _timed(f"""
with told as materialized (
  select *
    from json_to_recordset(%(settlements)s::json) as told (item bigint, fence bigint, result text)
), gone as (
  delete from django_workqueue_lease lease{_MINE}
  returning item, queue, tenant, fence, attempts, worker, claimed_at
), finished as (
  insert into django_workqueue_finished (
         item, queue, tenant, state, fence, attempts, worker, claimed_at,
         finished_at, keep_until, result, reason)
  select gone.item, gone.queue, gone.tenant, 'completed', gone.fence, gone.attempts,
         gone.worker, gone.claimed_at,
         {{clock}}, {{clock}} + interval '1 second' * body.retention_seconds,
         (select result from told where told.item = gone.item)::json, ''
    from gone
   cross join lateral (
      select retention_seconds
        from django_workqueue_queueitem
       where id = gone.item
       limit 1) body
      on conflict do nothing
), counted as (
  insert into django_workqueue_counter (queue, claimed, completed)
  select queue, -count(*), count(*)
    from gone
   group by queue
)
select item, 'completed' as state
  from gone
""")

RELEASE: Final = _timed(f"""
with told as materialized (
  select *
    from json_to_recordset(%(settlements)s::json)
      as told (item bigint, fence bigint, delay float8, cause text)
), gone as (
  delete from django_workqueue_lease lease{_MINE}
  returning item, queue, deployment_id, tenant, rank, fence, attempts, worker, claimed_at,
            cancel_requested
), verdict as materialized (
  select gone.*, told.cause, {{clock}} as now,
         {{clock}} + interval '1 second' * told.delay as due_at,
         case when gone.cancel_requested then 'cancelled'
              when told.delay > 0 then 'waiting'
              else 'ready'
         end as place
    from gone
    join told using (item)
), ready as (
  insert into django_workqueue_ready (
         queue, deployment_id, tenant, rank, item, fence, attempts, released_by)
  select queue, deployment_id, tenant, rank, item, fence, attempts, worker
    from verdict
   where place = 'ready'
      on conflict do nothing
), waiting as (
  insert into django_workqueue_waiting (
         item, queue, deployment_id, tenant, rank, fence, attempts, released_by,
         due_at, since, cause)
  select item, queue, deployment_id, tenant, rank, fence, attempts, worker, due_at, now, cause
    from verdict
   where place = 'waiting'
      on conflict do nothing
), cancelled as (
  insert into django_workqueue_finished (
         item, queue, tenant, state, fence, attempts, worker, claimed_at,
         finished_at, keep_until, result, reason)
  select verdict.item, verdict.queue, verdict.tenant, 'cancelled', verdict.fence,
         verdict.attempts, verdict.worker, verdict.claimed_at,
         verdict.now, verdict.now + interval '1 second' * body.retention_seconds, null, ''
    from verdict
   cross join lateral (
      select retention_seconds
        from django_workqueue_queueitem
       where id = verdict.item
       limit 1) body
   where place = 'cancelled'
      on conflict do nothing
), counted as (
  insert into django_workqueue_counter (queue, claimed, ready, waiting, cancelled)
  select queue, -count(*), count(*) filter (where place = 'ready'),
         count(*) filter (where place = 'waiting'), count(*) filter (where place = 'cancelled')
    from verdict
   group by queue
)
select item, case place when 'cancelled' then 'cancelled' else 'queued' end as state
  from verdict
""")

# ---------------------------------------------------------------- attempts without success

# From `gone`: the deleted leases, and how each attempt ended. Decided from the row itself,
# in the statement that takes it: a picture read earlier may be old.
_ENDED: Final = """
verdict as materialized (
  select gone.*, gone.attempts + 1 as number, moment.now,
         case when gone.cancel_requested then 'cancelled'
              when not gone.retryable or gone.attempts + 1 >= gone.max_attempts
              then 'dead_lettered'
              else 'queued'
         end as state,
         body.retention_seconds, body.dead_letter_retention_seconds,
         coalesce(gone.delay, body.backoff) as wait
    from (select {clock} as now) moment, gone
   cross join lateral (
      select retention_seconds, dead_letter_retention_seconds,
             least(backoff_seconds * power(2::float8, least(gone.attempts, 60)),
                   backoff_cap_seconds) as backoff
        from django_workqueue_queueitem
       where id = gone.item
       limit 1) body
), failure as (
  insert into django_workqueue_failure (
         item, number, fence, kind, outcome, error_class, message, traceback, fingerprint,
         worker, claimed_at, failed_at)
  select item, number, fence, kind, state, error_class, message, traceback, fingerprint,
         worker, claimed_at, now
    from verdict
      on conflict do nothing
), ready as (
  insert into django_workqueue_ready (
         queue, deployment_id, tenant, rank, item, fence, attempts, released_by)
  select queue, deployment_id, tenant, rank, item, fence, number, ''
    from verdict
   where state = 'queued' and wait <= 0
      on conflict do nothing
), waiting as (
  insert into django_workqueue_waiting (
         item, queue, deployment_id, tenant, rank, fence, attempts, released_by,
         due_at, since, cause)
  select item, queue, deployment_id, tenant, rank, fence, number, '',
         now + interval '1 second' * wait, now, 'backoff'
    from verdict
   where state = 'queued' and wait > 0
      on conflict do nothing
), buried as (
  insert into django_workqueue_deadletter (
         item, tenant, queue, deployment_id, fence, attempts, dead_at, keep_until, reason,
         error_class, fingerprint)
  select item, tenant, queue, deployment_id, fence, number, now,
         now + interval '1 second' * dead_letter_retention_seconds,
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
         queue, claimed, ready, waiting, dead_lettered, cancelled, reaped)
  select queue, -count(*),
         count(*) filter (where state = 'queued' and wait <= 0),
         count(*) filter (where state = 'queued' and wait > 0),
         count(*) filter (where state = 'dead_lettered'),
         count(*) filter (where state = 'cancelled'),
         count(*) filter (where kind = 'lapsed')
    from verdict
   group by queue
)
select item, state
  from verdict
 order by expires_at, item"""

_RETURNING_LEASE: Final = """
  returning lease.item, lease.queue, lease.deployment_id, lease.tenant, lease.rank, lease.fence,
            lease.attempts, lease.max_attempts, lease.worker, lease.claimed_at,
            lease.expires_at, lease.cancel_requested"""

# The same words for every row of a statement.
_TOLD_ONCE: Final = """
            , %(kind)s::text as kind, %(message)s::text as message, '' as error_class,
            '' as traceback, %(fingerprint)s::text as fingerprint, true as retryable,
            %(delay)s::float8 as delay"""

FAIL: Final = _timed(f"""
with told as materialized (
  select *
    from json_to_recordset(%(settlements)s::json) as told (
           item bigint, fence bigint, kind text, message text, error_class text,
           traceback text, fingerprint text, retryable boolean, delay float8)
), taken as (
  delete from django_workqueue_lease lease{_MINE}{_RETURNING_LEASE}
), gone as (
  select taken.*, told.kind, told.message, told.error_class, told.traceback,
         told.fingerprint, told.retryable, told.delay
    from taken
    join told using (item)
),{_ENDED}
""")

REAP: Final = _timed(f"""
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
ADOPT: Final = _timed(f"""
with gone as (
  delete from django_workqueue_lease lease
   where worker = %(worker)s::text
     and boot <> all(%(spare)s::text[]){_RETURNING_LEASE}{_TOLD_ONCE}
),{_ENDED}
""")

# ---------------------------------------------------------------- upkeep

FOLD_COUNTERS: Final = """
with gone as (
  delete from django_workqueue_counter
   where ctid = any(array(
           select ctid
             from django_workqueue_counter
            limit %(limit)s::int
              for update skip locked))
  returning *
)
insert into django_workqueue_counter (
       queue, ready, waiting, claimed, paused, dead_lettered, completed, cancelled, reaped,
       duplicates_suppressed)
select queue, sum(ready), sum(waiting), sum(claimed), sum(paused), sum(dead_lettered),
       sum(completed), sum(cancelled), sum(reaped), sum(duplicates_suppressed)
  from gone
 group by queue
"""
