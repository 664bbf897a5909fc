"""Whether a round left the database as it must be; every sentence tells what is wrong."""

from __future__ import annotations

from django.db.models import Count

from bench.tables import execute
from django_workqueue.doctor import examine
from django_workqueue.models import QueueItem


def queue_problems(alias: str, items: int, state: str, *, claims: int) -> list[str]:
    """Say what is wrong unless all *items* are in *state*, claimed *claims* times each."""
    stored = QueueItem.objects.using(alias).with_state()
    by_state = dict(stored.order_by().values_list("state").annotate(number=Count("*")))
    wrong = []
    if by_state != {state: items}:
        told = ", ".join(f"{by_state[name]} {name or 'nowhere'}" for name in sorted(by_state))
        wrong.append(f"there must be {items} {state} items, and there are: {told or 'none'}")
    if others := stored.exclude(fence=claims).count():
        wrong.append(f"{others} items were not claimed {claims} times")
    return wrong + examine(alias)


def bare_problems(**expected: int) -> list[str]:
    """Say what is wrong unless the bare tables have so many rows each."""
    wrong = []
    for place, number in expected.items():
        [(found,)] = execute(f"select count(*) from bench_{place}")
        if found != number:
            wrong.append(f"there must be {number} rows in bench_{place}, and there are {found}")
    return wrong
