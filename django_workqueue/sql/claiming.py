"""Promoting what is due, and claiming it."""

from __future__ import annotations

from typing import Final

from django_workqueue.sql.clock import timed

# The rows of `Waiting` that were locked as `due` become ready.
MADE_READY: Final = """), moved as (
  delete from django_workqueue_waiting
   where ctid = any(array(select tid from due))
  returning queue, deployment_id, tenant, rank, item, fence, attempts, settled_by, enqueued_at
), ready as (
  insert into django_workqueue_ready (
         queue, deployment_id, tenant, rank, item, fence, attempts, settled_by, enqueued_at)
  select queue, deployment_id, tenant, rank, item, fence, attempts, settled_by, enqueued_at
    from moved
), counted as (
  insert into django_workqueue_counter (queue, ready, waiting)
  select %(queue)s::text, count(*), -count(*)
    from moved
  having count(*) > 0
)"""

PROMOTE: Final = timed(f"""
with due as materialized (
  select ctid as tid
    from django_workqueue_waiting
   where queue = %(queue)s::text
     and due_at <= {{now}}
   order by queue, due_at
   limit %(limit)s::int
     for update skip locked
{MADE_READY}
select (select count(*) from moved) as promoted,
       exists (
         select
           from django_workqueue_hold
          where queue = %(queue)s::text
            and tenant = ''
       ) as held,
       exists (
         select
           from django_workqueue_hold
          where queue in ('', %(queue)s::text)
            and tenant <> ''
       ) as has_held_tenants
""")

_OF_A_LANE: Final = """
      select ctid as tid, tenant, rank, item, fence, attempts
        from django_workqueue_ready
       where queue = %(queue)s::text
         and deployment_id = {lane}
         and {range}
       order by queue, deployment_id, tenant, rank, item
       limit {limit}{lock}"""

# A branch of a UNION may not lock; a subquery of a branch may.
_OF_TWO_LANES: Final = """
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

_LOCK: Final = """
         for update skip locked"""


def _best(range_: str, *, pinned: bool, limit: str = "1", lock: str = _LOCK) -> str:
    """
    The best unlocked ready rows in a range of tenants, locked in the same step.

    For a pinned worker, of its own lane and the unpinned one together. Not to *lock*:
    the best ones, locked by others or not.
    """

    def lane(name: str) -> str:
        text = _OF_A_LANE.replace("{lane}", name).replace("{lock}", lock)
        return text.replace("{range}", range_).replace("{limit}", limit)

    if not pinned:
        return lane("''")
    both = _OF_TWO_LANES.replace("{unpinned}", lane("''")).replace("{limit}", limit)
    return both.replace("{pinned}", lane("%(deployment_id)s::text"))


# Rows of `Ready` are never updated, so what was seen is locked by its ctid: without another
# descent, and without a lock on the row of the lane that isn't taken.
_SEEN: Final = """
        from (select *
                from (select ctid as tid, tenant, rank, item, fence, attempts
                        from django_workqueue_ready
                       where ctid = seen.tid{unless}
                         for update skip locked) free
              union all
              select *
                from ({otherwise}
                     ) otherwise
              limit 1) best"""

#: Rows that others may hold at the head of a tenant's work: a claim each.
_SEEN_MORE: Final = 50

_IS_HELD: Final = """exists (
           select
             from django_workqueue_hold
            where queue in ('', %(queue)s::text)
              and tenant = {tenant})"""


def _step(range_: str, *, pinned: bool, holds: bool) -> str:
    """
    The next tenant in a range, with its best unlocked row.

    While there are holds a step may come without a row, at a tenant that isn't served: the
    walk goes on from there, so a held tenant costs a step however much of its work waits.
    """
    seen = _best(range_, pinned=pinned, lock="")
    if holds:
        unless = "\n                         and not seen.held"
        of_tenant = f"tenant = seen.tenant{unless}"
        free = _SEEN.replace("{unless}", unless)
        free = free.replace("{otherwise}", _best(of_tenant, pinned=pinned))
        return f"""
      select best.tid, seen.tenant, best.rank, best.item, best.fence, best.attempts
        from (select next.*, {_IS_HELD.replace("{tenant}", "next.tenant")} as held
                from ({seen}
                     ) next
             ) seen
        left join lateral (select *{free}
             ) best on true"""
    if pinned:
        return _taken(range_, limit="1")
    return _best(range_, pinned=False)


def _taken(range_: str, *, limit: str) -> str:
    """
    The best unlocked rows of two lanes, locked, and no other if it can be helped.

    What was seen without a lock is locked row by row, in order, until there are enough.
    Only if others hold more than `_SEEN_MORE` of it, the lanes are walked with locks: the
    rows of the lane that isn't taken then stay locked until the transaction ends.
    """
    seen = _best(range_, pinned=True, limit=f"({limit} + {_SEEN_MORE})", lock="")
    # One's own locks aren't skipped.
    others = f"{range_}\n         and ctid <> all(array(select tid from seen))"
    return f"""
      with seen as materialized ({seen}
      )
      select *
        from (select free.*
                from seen
               cross join lateral (
                  select ctid as tid, tenant, rank, item, fence, attempts
                    from django_workqueue_ready
                   where ctid = seen.tid
                     for update skip locked) free
               limit {limit}) best
      union all
      select *
        from ({_best(others, pinned=True, limit=limit)}
             ) otherwise
      limit {limit}"""


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
  insert into django_workqueue_turn (queue, deployment_id, number, item, tenant)
  select %(queue)s::text, %(deployment_id)s::text, newest.number + 1, latest.item, latest.tenant
    from newest, (select item, tenant from pick order by round desc, pos desc limit 1) latest
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
         enqueued_at, lease_seconds, worker, boot, process,
         claimed_at, expires_at, renewable_until, cancel_requested)
  select item, queue, deployment_id, tenant, rank, fence, attempts, max_attempts,
         enqueued_at, claim_seconds, worker, %(boot)s::text, %(process)s::int,
         claimed_at, expires_at, renewable_until, false
    from claimed
), counted as (
  insert into django_workqueue_counter (queue, ready, claimed)
  select %(queue)s::text, -count(*), (select count(*) from claimed)
    from pick
  having count(*) > 0
)
select claimed.*, newest.number + 1 as turn
  from claimed, newest
 order by round, pos"""


def claim_one(*, pinned: bool) -> str:
    """One item: the next tenant's after the one served last, else the first tenant's."""

    def step(range_: str) -> str:
        return _step(f"tenant {range_} (select tenant from newest)", pinned=pinned, holds=False)

    return timed(f"""
with {_NEWEST_TURN}, pick as materialized (
  select 1 as round, 1 as pos, best.*
    from (select * from ({step(">")}
                        ) ahead
          union all
          select * from ({step("<=")}
                        ) behind
          limit 1) best
), {_TAKE}
""")


def claim_many(*, pinned: bool, holds: bool) -> str:
    """
    A batch: the rotation from the one served last, all the way round, in one walk.

    With fewer tenants than the limit, each gives a quota, equal to one, as the turns would
    give it. A tenant that runs short leaves the batch short: the caller asks again.
    """

    def step(range_: str) -> str:
        return _step(range_, pinned=pinned, holds=holds)

    quota = (
        "(%(limit)s::int / tenants.number - 1"
        " + (first.pos <= %(limit)s::int %% tenants.number)::int)"
    )
    further = "tenant = first.tenant and (rank, item) > (first.rank, first.item)"
    rest = _taken(further, limit=quota) if pinned else _best(further, pinned=False, limit=quota)
    row, rows = ("(tid is not null)::int", "count(tid)") if holds else ("1", "count(*)")
    served = "where tid is not null" if holds else ""
    return timed(f"""
with recursive {_NEWEST_TURN}, ahead as (   -- the best of each tenant after the one served last
  select {row} as pos, best.*
    from newest, lateral ({step("tenant > newest.tenant")}
         ) best
  union all
  select ahead.pos + {row.replace("tid", "best.tid")}, best.*
    from ahead, lateral ({step("tenant > ahead.tenant")}
         ) best
   where ahead.pos < %(limit)s::int
), until_the_end as materialized (
  select {rows}::int as number from ahead
), behind as (   -- and on from the first tenant, up to the one served last
  select until_the_end.number + {row} as pos, best.*
    from until_the_end, newest, lateral ({step("tenant <= newest.tenant")}
         ) best
   where until_the_end.number < %(limit)s::int
  union all
  select behind.pos + {row.replace("tid", "best.tid")}, best.*
    from behind, newest, lateral ({step("tenant > behind.tenant and tenant <= newest.tenant")}
         ) best
   where behind.pos < %(limit)s::int
), first as materialized (
  select 1::bigint as round, * from ahead {served}
  union all
  select 1::bigint as round, * from behind {served}
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


def serves(*, pinned: bool) -> str:
    """Whether a claim would find a ready row, held tenants left out."""
    return f"""
with recursive hop as (
  select next.tenant, not {_IS_HELD.replace("{tenant}", "next.tenant")} as served
    from ({_best("tenant > ''", pinned=pinned, lock="")}
         ) next
  union all
  select next.tenant, not {_IS_HELD.replace("{tenant}", "next.tenant")} as served
    from hop, lateral ({_best("tenant > hop.tenant", pinned=pinned, lock="")}
         ) next
   where not hop.served
)
select exists (select from hop where served)
       and not exists (
         select
           from django_workqueue_hold
          where queue = %(queue)s::text
            and tenant = '') as served
"""


CLAIM_ONE: Final = {pinned: claim_one(pinned=pinned) for pinned in (False, True)}
CLAIM_MANY: Final = {
    (pinned, holds): claim_many(pinned=pinned, holds=holds)
    for pinned in (False, True)
    for holds in (False, True)
}
SERVES: Final = {pinned: serves(pinned=pinned) for pinned in (False, True)}

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
