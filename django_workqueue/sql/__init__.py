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
