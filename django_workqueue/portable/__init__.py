"""
The moves between places in portable ORM calls, for SQLite.

One writer at a time: each move opens a transaction, takes the database's write lock first
and then looks, so there is nothing to skip and nothing can change under it. Short
statements, no cleverness; the conformance suite proves it equal to the other stores.
"""

from django_workqueue.portable.accepting import Accepting
from django_workqueue.portable.claiming import Claiming
from django_workqueue.portable.settling import Settling


class PortableMoves(Accepting, Claiming, Settling):
    """`moves.Moves` by the ORM, one writer at a time."""
