"""What keeps the tables small."""

from __future__ import annotations

from typing import Final

from django_workqueue.sql.clock import timed

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
       duplicates_suppressed, completions, failures)
select queue, sum(ready), sum(waiting), sum(claimed), sum(paused), sum(dead_lettered),
       sum(completed), sum(cancelled), sum(reaped), sum(duplicates_suppressed),
       sum(completions), sum(failures)
  from gone
 group by queue
"""

# As every cold move it locks the bodies first, and in the very delete it looks again at what
# it saw: an item that was requeued meanwhile has no row here any more. The newest other
# acceptance of an id, its heir, is locked with it; one that is about to go too goes first.
# With the id goes the fence, which is never reset while anything of the id is known. What
# the heir was settled under is forgotten: nothing is a repetition of that any more. What is
# left of an item that somebody deleted goes too, or it would be in the way of all that follow.
_PRUNE: Final = timed("""
with over as materialized (
  select ctid as tid, item
    from django_workqueue_{place}
   where keep_until <= {now}
   order by keep_until, item
   limit %(limit)s::int
), candidate as materialized (
  select over.tid, over.item, body.id is null as deleted, heir.id as heir
    from over
    left join lateral (
      select id, tenant, item_id
        from django_workqueue_queueitem
       where id = over.item
       limit 1) body on true
    left join lateral (
      select id
        from django_workqueue_queueitem
       where tenant = body.tenant
         and item_id = body.item_id
         and id_freed
         and id <> over.item
       order by id + 0 desc   -- by id alone a walk back through all bodies would be a plan too
       limit 1) heir on true
), locked as materialized (
  select id, id_freed
    from django_workqueue_queueitem
   where id = any(array(select item from candidate union select heir from candidate))
   order by id
     for update skip locked
), prunable as materialized (
  select tid, item, heir
    from candidate
   where (deleted or item in (select id from locked))   -- a hashed subplan, not a nested loop
     and (heir is null
          or item in (select id from locked where id_freed)
          or heir in (select id from locked where id_freed)
             and heir not in (select item from over))
), gone as (
  delete from django_workqueue_{place}
   where ctid = any(array(select tid from prunable))
     and {now} - keep_until >= interval '0'   -- not a range of the index of all that is over
  returning item, queue, fence, {state}
), failures as (
  delete from django_workqueue_failure
   where item = any(array(select item from gone))
), forgotten as (
  delete from django_workqueue_queueitem
   where id = any(array(select item from gone))
  returning id, id_freed
), fences as materialized (   -- as a map: a join would be a nested loop too
  select jsonb_object_agg(item, fence) as of_item
    from gone
), succession as materialized (
  select array_agg(heir) as heirs, jsonb_object_agg(heir, of_item -> item::text) as fences
    from prunable, fences
   where heir is not null
     and (item in (select id from forgotten where not id_freed)) is true
), inherited as (
  update django_workqueue_queueitem
     set id_freed = false
   where id = any((select heirs from succession)::bigint[])
), fenced_finished as (
  update django_workqueue_finished
     set fence = (select (fences -> item::text)::bigint from succession), claimed_at = null
   where item = any((select heirs from succession)::bigint[])
     and fence < (select (fences -> item::text)::bigint from succession)
), fenced_dead as (
  update django_workqueue_deadletter
     set fence = (select (fences -> item::text)::bigint from succession), settled_by = ''
   where item = any((select heirs from succession)::bigint[])
     and fence < (select (fences -> item::text)::bigint from succession)
), counted as (
  insert into django_workqueue_counter (queue, completed, cancelled, dead_lettered)
  select queue, -count(*) filter (where state = 'completed'),
         -count(*) filter (where state = 'cancelled'),
         -count(*) filter (where state = 'dead_lettered')
    from gone
   group by queue
)
select count(*)
  from gone
""")
PRUNE: Final = {
    "finished": _PRUNE.replace("{place}", "finished").replace("{state}", "state"),
    "dead": _PRUNE.replace("{place}", "deadletter").replace("{state}", "'dead_lettered' as state"),
}
