"""
Finding jobs: what is found is what a look at every item by itself would find, in its order, each
once, however little is looked at for a page.
"""

import json
from base64 import urlsafe_b64encode
from datetime import UTC, datetime, timedelta
from itertools import combinations, product
from random import Random

import pytest
from django.db import OperationalError, connections, transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from django_workqueue import (
    InvalidFieldError,
    QueuePolicy,
    QueueUnavailableError,
    WorkItem,
    WorkItemNotFoundError,
    WorkState,
    jobs,
)
from django_workqueue.exceptions import WorkQueueError
from django_workqueue.jobs import Jobs, Page, Search, SearchTooBroadError, finding
from django_workqueue.models import Counter, Lease, QueueItem, Ready
from django_workqueue.reading import ItemReader
from django_workqueue.testing import make_queue
from tests.elsewhere import Elsewhere

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

BACKENDS = ("sqlite", "postgresql")
BEGAN = datetime(2026, 3, 1, tzinfo=UTC)
LIMITS = ("LOOKED_AT", "PROBED", "READY", "GATHERED")
TIMES = {
    WorkState.CLAIMED: ("lease", "claimed_at"),
    WorkState.PAUSED: ("waiting", "since"),
    WorkState.COMPLETED: ("finished", "finished_at"),
    WorkState.DEAD_LETTERED: ("dead_letter", "dead_at"),
    WorkState.CANCELLED: ("finished", "finished_at"),
}
ENDED = (WorkState.COMPLETED, WorkState.DEAD_LETTERED, WorkState.CANCELLED)


@pytest.fixture(params=BACKENDS)
def queue(request):
    return make_queue(request.param, QueuePolicy(max_attempts=2))


@pytest.fixture
def scene(queue):
    """Items in every state and place, and all their rows."""
    return play(queue, Random(7))


def play(queue, random):
    fates = (
        lambda item: queue.complete(item.id, tenant=item.tenant, worker=item.worker),
        lambda item: queue.fail(
            item.id, tenant=item.tenant, worker=item.worker, error="no", retryable=False
        ),
        lambda item: queue.fail(item.id, tenant=item.tenant, worker=item.worker, error="no"),
        lambda item: queue.pause(item.id, tenant=item.tenant, worker=item.worker),
        lambda item: queue.release(item.id, tenant=item.tenant, worker=item.worker),
        lambda item: None,
    )
    for number in range(8):
        # Names come again once their items have ended.
        stored = queue.enqueue_many(
            WorkItem(
                tenant=random.choice(["a", "b", "c"]),
                id=f"i{random.randrange(40)}",
                queue=random.choice(["default", "mail"]),
                handler=random.choice(["", "h1", "h2"]),
                deployment_id=random.choice(["", "blue"]),
                priority=random.choice([0, 50]),
                dedupe_key=random.choice([*[None] * 6, "k1", "k2"]),
                available_at=random.choice([None, None, queue.moves.now() + timedelta(days=1)]),
            )
            for _ in range(10)
        )
        for name in ("default", "mail"):
            worker, pin = random.choice(["w1", "w2"]), random.choice([None, "blue"])
            for item in queue.claim_many(worker=worker, queue=name, deployment_id=pin, limit=4):
                random.choice(fates)(item)
        for item in random.sample(stored, 2):
            if queue.get(item.id, tenant=item.tenant, job_id=item.job_id).state == "queued":
                queue.cancel(item.id, tenant=item.tenant, job_id=item.job_id)
        queue.advance(number)
    return created_in_a_row(queue, random)


def created_in_a_row(queue, random):
    """Space the times of creation like days that overlap a little; return the rows."""
    for row in QueueItem.bodies.using(queue.using).all():
        jitter = timedelta(minutes=random.uniform(-4, 4))
        created_at = BEGAN + row.pk * timedelta(minutes=1) + jitter
        QueueItem.bodies.using(queue.using).filter(pk=row.pk).update(created_at=created_at)
    return everything(queue)


def everything(queue):
    return list(ItemReader(queue.using).items().order_by("pk"))


def found_by_hand(rows, search):
    """The job ids of the rows that *search* looks for, in its order, by a look at each."""
    found = [row for row in rows if is_wanted(row, search)]
    if search.sort_by == "created_at":
        return [row.pk for row in sorted(found, key=lambda r: r.pk, reverse=search.descending)]
    [state] = search.states
    place, column = TIMES[state]
    found.sort(key=lambda row: (getattr(getattr(row, place), column), row.pk))
    return [row.pk for row in (reversed(found) if search.descending else found)]


def is_wanted(row, search):
    lease = getattr(row, "lease", None)
    return all(
        (
            not search.states or row.state in search.states,
            search.queue in (None, row.queue),
            search.tenant in (None, row.tenant),
            search.item_id in (None, row.item_id),
            search.handler in (None, row.handler),
            search.deployment_id in (None, row.deployment_id),
            search.worker is None or (lease is not None and lease.worker == search.worker),
            search.dedupe_key is None
            or (row.dedupe_key == search.dedupe_key and not row.key_freed),
            search.created_after is None or row.created_at >= search.created_after,
            search.created_before is None or row.created_at < search.created_before,
        )
    )


def ids(page):
    return [row.pk for row in page.rows]


def read_through(queue, search, limit):
    """Follow the cursors from the first page to the last; return the pages."""
    reader = Jobs(queue.using)
    pages = [reader.page(search, limit=limit)]
    while pages[-1].next_cursor is not None:
        pages.append(reader.after(search, pages[-1].next_cursor, limit=limit))
        assert len(pages) < 500, "the cursors lead nowhere"
    return pages


def check(queue, rows, search, limit):
    pages = read_through(queue, search, limit)
    expected = found_by_hand(rows, search)
    assert [pk for page in pages for pk in ids(page)] == expected, search
    assert all(len(page.rows) <= limit for page in pages)
    first = pages[0]
    assert first.total <= len(expected) if first.is_capped else first.total == len(expected)
    assert {page.total for page in pages[1:]} <= {None}


def narrow(monkeypatch, **limits):
    for name, value in limits.items():
        monkeypatch.setattr(finding, name, value)


def values(rows):
    """Filters, each alone, with values that some items have, and others that none has."""
    moments = [row.created_at for row in rows]
    return [
        *({"states": frozenset({state})} for state in WorkState),
        {"states": frozenset({WorkState.QUEUED, WorkState.CLAIMED, WorkState.PAUSED})},
        {"states": frozenset(ENDED)},
        {"states": frozenset(WorkState)},
        *({"queue": each} for each in ("default", "mail", "other")),
        *({"tenant": each} for each in ("a", "b", "nobody")),
        *({"item_id": each} for each in ("i1", "i2", "other")),
        *({"handler": each} for each in ("", "h1", "other")),
        *({"deployment_id": each} for each in ("", "blue", "other")),
        *({"worker": each} for each in ("w1", "w2", "other")),
        *({"dedupe_key": each} for each in ("k1", "k2", "other")),
        *({"created_after": each} for each in (moments[20], BEGAN, max(moments))),
        *({"created_before": each} for each in (moments[20], BEGAN, min(moments))),
    ]


class TestFinding:
    def test_the_scene_has_all_kinds_of_items(self, queue, scene):
        assert {row.state for row in scene} == {*WorkState}
        assert Ready._base_manager.using(queue.using).exists()
        assert any(row.state == "queued" and hasattr(row, "waiting") for row in scene)
        assert any(row.id_freed for row in scene)
        assert any(row.key_freed for row in scene)
        assert {row.deployment_id for row in scene if row.state == "queued"} == {"", "blue"}

    @pytest.mark.parametrize("narrowed", [{}, dict.fromkeys(LIMITS, 7)], ids=["whole", "in parts"])
    def test_every_filter_alone_finds_what_it_says(self, queue, scene, monkeypatch, narrowed):
        narrow(monkeypatch, **narrowed)
        for given_ in [{}, *values(scene)]:
            for descending in (True, False):
                check(queue, scene, Search(**given_, descending=descending), limit=5)

    @pytest.mark.parametrize("narrowed", [{}, dict.fromkeys(LIMITS, 20)], ids=["whole", "in parts"])
    def test_so_does_every_pair(self, queue, scene, monkeypatch, narrowed):
        narrow(monkeypatch, **narrowed)
        for one, other in combinations(values(scene), 2):
            if one.keys() != other.keys():
                check(queue, scene, Search(**one, **other), limit=30)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_whatever_is_looked_for_is_found_once_and_in_order(self, backend, monkeypatch):
        queue = make_queue(backend, QueuePolicy(max_attempts=2))
        rows = play(queue, Random(11))
        every = values(rows)
        names = sorted({name for each in every for name in each})
        choices = st.fixed_dictionaries(
            {},
            optional={
                name: st.sampled_from([each[name] for each in every if name in each])
                for name in names
            },
        )

        @settings(
            max_examples=80,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[*HealthCheck],
        )
        @given(
            choices,
            st.booleans(),
            st.integers(1, 30),
            st.fixed_dictionaries({name: st.integers(4, 40) for name in LIMITS}),
        )
        def look(given_, descending, limit, limits):
            narrow(monkeypatch, **limits)
            check(queue, rows, Search(**given_, descending=descending), limit)

        look()

    def test_an_item_whose_id_was_taken_over_is_found_too(self, queue):
        old = queue.enqueue(WorkItem(tenant="t", id="one", dedupe_key="k"))
        queue.cancel("one", tenant="t")
        new = queue.enqueue(WorkItem(tenant="t", id="one", dedupe_key="k"))
        other = queue.enqueue(WorkItem(tenant="u", id="one", dedupe_key="k"))
        three = [other.job_id, new.job_id, old.job_id]
        reader = Jobs(queue.using)
        assert ids(reader.page(Search(item_id="one"), limit=9)) == three
        assert ids(reader.page(Search(item_id="one", tenant="t"), limit=9)) == three[1:]
        # The key is looked for where it is held.
        assert ids(reader.page(Search(dedupe_key="k"), limit=9)) == three[:2]
        assert ids(reader.page(Search(dedupe_key="k", tenant="t"), limit=9)) == three[1:2]

    def test_only_what_is_claimed_has_a_worker(self, queue, scene):
        reader = Jobs(queue.using)
        completed = Search(worker="w1", states=frozenset({WorkState.COMPLETED}))
        assert reader.page(completed, limit=9) == Page(
            rows=[], next_cursor=None, total=0, is_capped=False
        )

    def test_what_is_created_at_a_bound_is_in_after_it_and_not_before_it(self, queue, scene):
        row, reader = scene[30], Jobs(queue.using)
        after = reader.page(Search(created_after=row.created_at), limit=100)
        before = reader.page(Search(created_before=row.created_at), limit=100)
        assert row.pk in ids(after)
        assert row.pk not in ids(before)
        assert {*ids(after), *ids(before)} == {each.pk for each in scene}

    def test_no_bound_misses_what_was_created_out_of_order(self, queue, scene):
        for row in scene:
            for bound in ("created_after", "created_before"):
                check(queue, scene, Search(**{bound: row.created_at}), limit=100)

    def test_a_key_of_more_tenants_than_are_gathered_is_found_where_it_is_held(
        self, queue, monkeypatch
    ):
        narrow(monkeypatch, GATHERED=2)
        queue.enqueue(WorkItem(tenant="t0", id="old", dedupe_key="k"))
        queue.cancel("old", tenant="t0")
        stored = queue.enqueue_many(WorkItem(tenant=f"t{n}", dedupe_key="k") for n in range(3))
        page = Jobs(queue.using).page(Search(dedupe_key="k", descending=False), limit=9)
        assert ids(page) == [each.job_id for each in stored]

    def test_what_is_ready_of_a_large_tenant_is_found_for_all_deployments(self, queue, monkeypatch):
        narrow(monkeypatch, GATHERED=1, LOOKED_AT=1, PROBED=1)
        lanes = list(product(("default", "mail"), ("", "blue", "green")))
        stored = queue.enqueue_many(
            WorkItem(tenant=tenant, queue=name, deployment_id=deployment_id)
            for tenant in ("t", "u")
            for name, deployment_id in lanes
        )[: len(lanes)]
        for limits, length in (({}, 6), ({"queue": "mail"}, 3), ({"deployment_id": "green"}, 2)):
            search = Search(tenant="t", states=frozenset({WorkState.QUEUED}), **limits)
            page = Jobs(queue.using).page(search, limit=9)
            assert (len(page.rows), page.next_cursor) == (length, None)
            assert {*ids(page)} <= {each.job_id for each in stored}

    def test_a_long_time_is_found_in_few_steps(self, queue, scene):
        bodies = QueueItem.bodies.using(queue.using)
        bodies.filter(pk=scene[-1].pk).update(id=2**62, item_id="far")
        statements = []

        def note(execute, text, *rest):
            statements.append(text)
            return execute(text, *rest)

        with connections[queue.using].execute_wrapper(note):
            Jobs(queue.using).page(Search(created_after=scene[10].created_at), limit=5)
        assert len(statements) < 100

    def test_an_item_in_no_place_is_not_shown(self, queue):
        lost, good = queue.enqueue_many([WorkItem(tenant="t"), WorkItem(tenant="t")])
        Ready.objects.using(queue.using).filter(item_id=lost.job_id).delete()
        reader = Jobs(queue.using)
        assert ids(reader.page(Search(), limit=9)) == [good.job_id]
        with pytest.raises(WorkItemNotFoundError):
            reader.one(lost.job_id)

    def test_a_list_reads_no_payload(self, queue):
        queue.enqueue(WorkItem(tenant="t", payload={"a": "x" * 1000}))
        [row] = Jobs(queue.using).page(Search(), limit=9).rows
        assert "payload" in row.get_deferred_fields()
        assert not hasattr(row, "payload_text")


class TestSparsePages:
    """What is rare among many is not looked for to the end by one page."""

    def test_one_says_where_to_go_on(self, queue, monkeypatch):
        narrow(monkeypatch, **dict.fromkeys(LIMITS, 10))
        rare = queue.enqueue(WorkItem(tenant="t", handler="rare")).job_id
        queue.enqueue_many(WorkItem(tenant="t", handler="common") for _ in range(25))
        pages = read_through(queue, Search(handler="rare"), 5)
        assert [ids(page) for page in pages] == [[], [], [rare]]
        assert (pages[0].total, pages[0].is_capped) == (0, True)

    def test_what_exactly_fits_is_known_to_be_all(self, queue, monkeypatch):
        narrow(monkeypatch, LOOKED_AT=10)
        queue.enqueue_many(WorkItem(tenant="t", handler="h") for _ in range(10))
        page = Jobs(queue.using).page(Search(handler="h"), limit=10)
        assert (len(page.rows), page.next_cursor, page.is_capped) == (10, None, False)

    @pytest.mark.parametrize(
        "searched",
        [
            {"states": frozenset({WorkState.PAUSED})},
            {"states": frozenset({WorkState.DEAD_LETTERED}), "tenant": "rare"},
            {"states": frozenset({WorkState.QUEUED}), "handler": "rare"},
            {"states": frozenset({WorkState.QUEUED}), "tenant": "rare", "queue": "default"},
            {"states": frozenset({WorkState.COMPLETED}), "tenant": "rare"},
            {"tenant": "rare"},
            {"item_id": "rare"},
            {"dedupe_key": "rare"},
        ],
        ids=lambda searched: " ".join(searched),
    )
    def test_what_an_index_leads_to_is_on_the_first_page(self, queue, monkeypatch, searched):
        """Though it is the oldest of more items than are looked at."""
        states = searched.get("states", ())
        if WorkState.DEAD_LETTERED in states:  # of a tenant with too many items to know them
            queue.enqueue_many(WorkItem(tenant="rare", queue="third") for _ in range(20))
        rare = queue.enqueue(
            WorkItem(tenant="rare", id="rare", handler="rare", dedupe_key="rare")
        ).job_id
        if states and WorkState.QUEUED not in states:
            settle(queue, [*states])
        for _ in range(10):
            queue.enqueue_many(WorkItem(tenant="common", queue="other") for _ in range(4))
            settle(queue, ENDED[:2], "other")
            if WorkState.PAUSED in states:
                later = queue.moves.now() + timedelta(days=1)
                queue.enqueue(WorkItem(tenant="common", queue="other", available_at=later))
        narrow(monkeypatch, LOOKED_AT=3, PROBED=30, READY=30, GATHERED=5)
        page = Jobs(queue.using).page(Search(**searched), limit=5)
        assert (ids(page), page.next_cursor) == ([rare], None)

    def test_several_places_are_looked_through_to_the_same_depth(self, queue, monkeypatch):
        jobs_ = [
            queue.enqueue(WorkItem(tenant="t", id=f"i{number}")).job_id for number in range(12)
        ]
        for number in (0, 1, 10):
            queue.cancel(f"i{number}", tenant="t")
        narrow(monkeypatch, LOOKED_AT=4, PROBED=4, READY=1, GATHERED=1)
        states = frozenset({WorkState.QUEUED, WorkState.CANCELLED})
        for descending in (True, False):
            search = Search(states=states, descending=descending)
            pages = read_through(queue, search, 100)
            assert len(pages) > 2
            found = [pk for page in pages for pk in ids(page)]
            assert found == sorted(jobs_, reverse=descending)

    def test_their_ids_can_be_had_at_once(self, queue, monkeypatch):
        narrow(monkeypatch, **dict.fromkeys(LIMITS, 10))
        rare = queue.enqueue(WorkItem(tenant="t", handler="rare")).job_id
        queue.enqueue_many(WorkItem(tenant="t", handler="common") for _ in range(25))
        reader, search = Jobs(queue.using), Search(handler="rare")
        assert reader.ids(search, most=5) == ([], True)
        assert reader.ids(search, most=5, passes=2) == ([], True)
        assert reader.ids(search, most=5, passes=3) == ([rare], False)
        common = Search(handler="common", descending=False)
        assert reader.ids(common, most=25, passes=9) == ([*range(rare + 1, rare + 26)], False)
        assert reader.ids(common, most=24, passes=9) == ([*range(rare + 1, rare + 25)], True)


def settle(queue, states, name="default"):
    """Claim items and leave them in these states, one each."""
    for state, item in zip(
        states, queue.claim_many(worker="w", queue=name, limit=len(states)), strict=True
    ):
        named = {"tenant": item.tenant, "worker": "w"}
        if state is WorkState.COMPLETED:
            queue.complete(item.id, **named)
        elif state is WorkState.DEAD_LETTERED:
            queue.fail(item.id, **named, error="no", retryable=False)
        elif state is WorkState.PAUSED:
            queue.pause(item.id, **named)


class TestTotals:
    def test_states_and_a_queue_are_counted_exactly(self, queue, scene, monkeypatch):
        monkeypatch.setattr(jobs, "COUNTED", 9)
        narrow(monkeypatch, **dict.fromkeys(LIMITS, 5))
        for name, states in product((None, "default"), ((), (WorkState.QUEUED,), ENDED)):
            search = Search(states=frozenset(states), queue=name)
            page = Jobs(queue.using).page(search, limit=3)
            assert (page.total, page.is_capped) == (len(found_by_hand(scene, search)), False)

    def test_other_things_are_counted_so_far(self, queue, monkeypatch):
        monkeypatch.setattr(jobs, "COUNTED", 9)
        for number, expected in ((9, (9, False)), (1, (9, True))):
            queue.enqueue_many(WorkItem(tenant="t") for _ in range(number))
            page = Jobs(queue.using).page(Search(tenant="t"), limit=3)
            assert (page.total, page.is_capped) == expected

    def test_damaged_counters_never_make_less_than_nothing(self, queue):
        queue.enqueue(WorkItem(tenant="t"))
        Counter.objects.using(queue.using).create(queue="default", completed=-5)
        assert Jobs(queue.using).page(Search(), limit=3).total == 1


NO_PAGES = (
    (0, 1, "limit"),
    (1001, 1, "limit"),
    (True, 1, "limit"),
    (1, 0, "page"),
    (1, 10_001, "page"),
    (1000, 11, "page"),
    (20, "2", "page"),
)


class TestNumberedPages:
    @pytest.mark.parametrize("filters", [{}, {"tenant": "a"}, {"states": frozenset(ENDED)}])
    def test_they_are_those_that_the_cursors_lead_to(self, queue, scene, filters):
        search, reader = Search(**filters), Jobs(queue.using)
        pages = read_through(queue, search, 4)
        for number, page in enumerate(pages, 1):
            numbered = reader.page(search, limit=4, number=number)
            assert ids(numbered) == ids(page)
            assert numbered.next_cursor == page.next_cursor
            assert numbered.total == pages[0].total
        beyond = reader.page(search, limit=4, number=len(pages) + 1)
        assert (beyond.rows, beyond.next_cursor) == ([], None)

    def test_the_last_one_that_fits_has_a_cursor_to_the_next(self, queue, monkeypatch):
        monkeypatch.setattr(jobs, "COUNTED", 6)
        queue.enqueue_many(WorkItem(tenant="t") for _ in range(8))
        for search in (Search(), Search(tenant="t")):
            page = Jobs(queue.using).page(search, limit=3, number=2)
            rest = Jobs(queue.using).after(search, page.next_cursor, limit=3)
            assert (len(page.rows), len(rest.rows), rest.next_cursor) == (3, 2, None)

    def test_others_are_refused(self):
        for limit, number, field in NO_PAGES:
            with pytest.raises(InvalidFieldError) as refused:
                Jobs("default").page(Search(), limit=limit, number=number)
            assert refused.value.field == field, (limit, number)


NO_ORDERS = (
    ("updated_at", (), "claimed, paused, dead_lettered, completed, cancelled"),
    ("updated_at", ("queued",), "claimed, paused, dead_lettered, completed, cancelled"),
    ("updated_at", ("completed", "cancelled"), "claimed, paused"),
    ("completed_at", (), "dead_lettered, completed, cancelled"),
    ("completed_at", ("claimed",), "dead_lettered, completed, cancelled"),
    ("priority", ("claimed",), "names no order"),
)


class TestSorting:
    @pytest.mark.parametrize("descending", [True, False])
    def test_by_the_time_of_a_place(self, queue, scene, descending):
        for state, sort_by in product(TIMES, ("updated_at", "completed_at")):
            if sort_by == "updated_at" or state in ENDED:
                for filters in ({}, {"tenant": "a"}, {"queue": "mail"}, {"handler": "h1"}):
                    search = Search(
                        states=frozenset({state}),
                        sort_by=sort_by,
                        descending=descending,
                        **filters,
                    )
                    check(queue, scene, search, limit=2)

    @pytest.mark.parametrize("descending", [True, False])
    def test_the_same_time_is_sorted_by_job_id(self, queue, descending):
        queue.enqueue_many(WorkItem(tenant="t", id=f"i{number}") for number in range(7))
        claimed = [each.job_id for each in queue.claim_many(worker="w", limit=7)]
        search = Search(
            states=frozenset({WorkState.CLAIMED}), sort_by="updated_at", descending=descending
        )
        found = [pk for page in read_through(queue, search, 2) for pk in ids(page)]
        assert found == sorted(claimed, reverse=descending)

    @pytest.mark.parametrize("sort_by", ["updated_at", "completed_at"])
    def test_the_creation_bounds_hold_here_too(self, queue, scene, sort_by):
        for bound in ("created_after", "created_before"):
            search = Search(
                states=frozenset({WorkState.COMPLETED}),
                sort_by=sort_by,
                **{bound: scene[30].created_at},
            )
            check(queue, scene, search, limit=2)

    def test_without_such_a_place_it_is_refused(self):
        for sort_by, states, told in NO_ORDERS:
            with pytest.raises(InvalidFieldError, match=told) as refused:
                Search(sort_by=sort_by, states=frozenset(WorkState(state) for state in states))
            assert refused.value.field == "sort_by"


def encoded(*values):
    return urlsafe_b64encode(json.dumps(values, separators=(",", ":")).encode()).decode()


BY_TIME = Search(states=frozenset({WorkState.COMPLETED}), sort_by="completed_at")


NONE_OF_THIS_ORDER = (
    "",
    "x",
    "é",
    "\ud800",
    "====",
    encoded(),
    encoded("created_at", True),
    encoded("created_at", True, "7"),
    encoded("created_at", True, True),
    encoded("created_at", True, 7.0),
    encoded("created_at", True, -1),
    encoded("created_at", True, 2**63),
    encoded("created_at", True, 7, 7),
    encoded("created_at", 1, 7),
    encoded("created_at", False, 7),
    encoded("completed_at", True, "2026-01-01T00:00:00+00:00", 7),
    encoded("created_at", True, 77).rstrip("="),
    encoded("created_at", True, 7) + "\n",
    urlsafe_b64encode(b'["created_at", true, 7]').decode(),
    urlsafe_b64encode(b"[" * 100_000).decode(),
    urlsafe_b64encode(b'{"created_at":1}').decode(),
    urlsafe_b64encode(b"7").decode(),
    urlsafe_b64encode(b"\xff").decode(),
)
#: Times that we would not write.
NO_TIMES = (
    encoded("completed_at", True, "2026-01-01T00:00:00", 7),
    encoded("completed_at", True, "2026-01-01T05:45:00+05:45", 7),
    encoded("completed_at", True, "2026-01-01", 7),
    encoded("completed_at", True, "0001-01-01T00:00:00+00:00", 7),
    encoded("completed_at", True, "9999-12-31T23:59:59-12:00", 7),
    encoded("completed_at", True, "", 7),
    encoded("completed_at", True, None, 7),
    encoded("completed_at", True, 7),
    encoded("updated_at", True, "2026-01-01T00:00:00+00:00", 7),
)


class TestCursors:
    def test_what_is_none_of_this_order_is_refused(self):
        reader = Jobs("default")
        for search, cursors in ((Search(), NONE_OF_THIS_ORDER), (BY_TIME, NO_TIMES)):
            for cursor in cursors:
                with pytest.raises(InvalidFieldError) as refused:
                    reader.after(search, cursor, limit=5)
                assert refused.value.field == "cursor", cursor

    def test_one_of_ours_is_taken_and_opaque(self, queue):
        Jobs(queue.using).after(
            BY_TIME, encoded("completed_at", True, "2026-01-01T00:00:00+00:00", 7), limit=5
        )
        queue.enqueue_many(WorkItem(tenant="t") for _ in range(2))
        cursor = Jobs(queue.using).page(Search(), limit=1).next_cursor
        assert cursor.replace("-", "").replace("_", "").rstrip("=").isalnum()

    def test_one_of_another_search_never_leaves_the_bounds(self, queue, scene):
        bounded = Search(created_before=scene[20].created_at)
        last = encoded("created_at", True, scene[-1].pk)
        page = Jobs(queue.using).after(bounded, last, limit=100)
        assert ids(page) == found_by_hand(scene, bounded)


IMPOSSIBLE = (
    ("queue", ""),
    ("tenant", ""),
    ("item_id", ""),
    ("worker", ""),
    ("dedupe_key", ""),
    ("tenant", "nul\x00"),
    ("handler", "\ud800"),
    ("deployment_id", "x" * 101),
    ("queue", 7),
    ("states", frozenset({"nonsense"})),
    ("created_after", datetime(2026, 1, 1)),  # noqa: DTZ001
    ("created_before", datetime(9999, 12, 31, tzinfo=UTC)),
    ("created_after", datetime(1, 1, 1, tzinfo=UTC)),
    ("created_after", "2026-01-01"),
)


class TestRefusals:
    def test_what_no_item_can_have_is_refused_by_name(self):
        for field, value in IMPOSSIBLE:
            with pytest.raises(InvalidFieldError) as refused:
                Search(**{field: value})
            assert refused.value.field == field, value

    @pytest.mark.parametrize("name", ["item_id", "dedupe_key"])
    def test_a_name_alone_is_asked_of_so_many_tenants(self, queue, monkeypatch, name):
        named = {"item_id": {"id": "x"}, "dedupe_key": {"dedupe_key": "x"}}[name]
        stored = queue.enqueue_many(WorkItem(tenant=f"t{n}", **named) for n in range(4))
        monkeypatch.setattr(finding, "TENANTS", 4)
        reader, search = Jobs(queue.using), Search(**{name: "x"})
        assert len(reader.page(search, limit=9).rows) == 4
        monkeypatch.setattr(finding, "TENANTS", 3)
        with pytest.raises(SearchTooBroadError, match="name the tenant"):
            reader.page(search, limit=9)
        search = Search(tenant="t1", **{name: "x"})
        assert ids(reader.page(search, limit=9)) == [stored[1].job_id]

    def test_what_takes_too_long_is_told_with_what_to_narrow(self, monkeypatch):
        queue = make_queue("postgresql")
        queue.enqueue(WorkItem(tenant="t"))
        monkeypatch.setattr(jobs, "STATEMENT_TIMEOUT", 50)
        with Elsewhere("postgresql") as other:
            other.begin()
            other.call(lambda: lock(queue))
            with pytest.raises(SearchTooBroadError, match=r"0\.05 seconds: narrow it") as refused:
                Jobs(queue.using).page(Search(), limit=5)
            other.rollback()
        assert isinstance(refused.value, WorkQueueError)
        assert not isinstance(refused.value, QueueUnavailableError)
        assert len(Jobs(queue.using).page(Search(), limit=5).rows) == 1

    def test_other_trouble_of_the_database_is_told_as_such(self, queue):
        def refuse(*call):
            raise OperationalError("gone")

        reader = Jobs(queue.using)
        cursor = encoded("created_at", True, 7)
        for call in (
            lambda: reader.page(Search(), limit=5),
            lambda: reader.after(Search(), cursor, limit=5),
            lambda: reader.ids(Search(), most=5),
            lambda: reader.one(1),
        ):
            with (
                connections[queue.using].execute_wrapper(refuse),
                pytest.raises(QueueUnavailableError, match="jobs: the store is unavailable: gone"),
            ):
                call()


def lock(queue):
    with connections[queue.using].cursor() as cursor:
        cursor.execute("lock table django_workqueue_queueitem in access exclusive mode")


class TestMoves:
    """Items move while they are looked for."""

    def test_what_has_left_its_state_is_not_shown(self, monkeypatch):
        queue = make_queue("sqlite")
        _, second = queue.enqueue_many([WorkItem(tenant="t"), WorkItem(tenant="t")])
        find = finding.Finder.find

        def found_and_moved(*arguments):
            found = find(*arguments)
            queue.claim(worker="w")
            return found

        monkeypatch.setattr(finding.Finder, "find", found_and_moved)
        page = Jobs(queue.using).page(Search(states=frozenset({WorkState.QUEUED})), limit=5)
        assert ids(page) == [second.job_id]

    def test_one_picture_has_each_item_in_one_place(self, monkeypatch):
        queue = make_queue("postgresql")
        stored = queue.enqueue(WorkItem(tenant="t"))
        sources, walk, moved = finding.Finder._sources, finding.Finder._walk, []

        def leases_first(*arguments):
            return sorted(sources(*arguments), key=lambda each: each.wanted.model is not Lease)

        def walk_and_move(*arguments):
            found = walk(*arguments)
            if not moved:
                # To where was looked already, from where is looked next.
                moved.append(other.call(lambda: queue.claim(worker="w")))
            return found

        monkeypatch.setattr(finding.Finder, "_sources", leases_first)
        monkeypatch.setattr(finding.Finder, "_walk", walk_and_move)
        states = frozenset({WorkState.QUEUED, WorkState.CLAIMED})
        with Elsewhere("postgresql") as other:
            page = Jobs(queue.using).page(Search(states=states), limit=5)
        assert ids(page) == [stored.job_id] == [moved[0].job_id]

    def test_in_a_transaction_of_the_callers_nothing_of_it_is_changed(self, queue):
        with transaction.atomic(using=queue.using):
            stored = queue.enqueue(WorkItem(tenant="t"))
            page = Jobs(queue.using).page(Search(), limit=5)
            assert ids(page) == [stored.job_id]
            if connections[queue.using].vendor == "postgresql":
                with connections[queue.using].cursor() as cursor:
                    cursor.execute("show statement_timeout")
                    assert cursor.fetchone() == ("0",)
                    cursor.execute("show enable_seqscan")
                    assert cursor.fetchone() == ("on",)
        assert queue.get(stored.id, tenant="t").state == "queued"


class TestOne:
    def test_has_all_that_is_stored(self, queue, scene):
        for row in scene:
            found = Jobs(queue.using).one(row.pk)
            assert (found.pk, found.state, found.payload_text) == (row.pk, row.state, "{}")

    def test_what_is_not_there_is_not_found(self, queue):
        # Of the last Python refuses to print the digits.
        for job_id in (0, -1, 10**9, 2**63 - 1, 2**63, 10**40, 10**5000):
            with pytest.raises(WorkItemNotFoundError):
                Jobs(queue.using).one(job_id)
