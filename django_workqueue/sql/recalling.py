"""Fetching back what waits for a handler."""

from __future__ import annotations

from typing import Final

from django_workqueue.sql.claiming import MADE_READY

# In steps of `since`, whole ones: rows without end may have the same time, and the next
# batch begins after it.
RECALL: Final = f"""
with seen as materialized (
  select ctid as tid, item, deployment_id, since
    from django_workqueue_waiting
   where queue = %(queue)s::text
     and cause = 'unknown_handler'
     and since > coalesce(%(after)s::timestamptz, '-infinity')
   order by queue, since
   fetch first (%(limit)s::int) rows with ties
), known as materialized (
  select tid
    from seen
   cross join lateral (
      select handler
        from django_workqueue_queueitem
       where id = seen.item
       limit 1) body
   where deployment_id = any(%(lanes)s::text[])
     and handler = any(%(handlers)s::text[])
), due as materialized (
  select ctid as tid
    from django_workqueue_waiting
   where ctid = any(array(select tid from known))
     for update skip locked
{MADE_READY}
select (select count(*) from moved) as recalled,
       (select max(since) from seen having count(*) >= %(limit)s::int) as seen
"""
