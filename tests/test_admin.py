"""The admin's lists: readable with any text in them, and for reading only."""

import re
from datetime import timedelta

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_workqueue import WorkItem, get_queue
from django_workqueue.admin import CappedPaginator
from django_workqueue.models import (
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Waiting,
    WorkerProcess,
)

pytestmark = pytest.mark.django_db(databases="__all__")

HOSTILE = "<script>alert('x')</script>&\"'"
MODELS = [QueueItem, Lease, Waiting, DeadLetter, Finished, Failure, WorkerProcess]
by_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)


def address(model, page="changelist", *args):
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


def fill(number, text=HOSTILE):
    """Leave *number* items in each place, with *text* wherever somebody may write one."""
    queue = get_queue()
    places = ("lease", "waiting", "dead", "finished", "ready")
    for place in places:
        for each in range(number):
            names = {"tenant": text, "id": f"{place} {each} {text}"}
            item = WorkItem(handler=text, payload={"secret": text}, queue=place, **names)
            queue.enqueue(item)
            if place == "ready":
                continue
            claimed = queue.claim(worker=text, queue=place)
            held = {"tenant": text, "worker": text, "fence": claimed.fence}
            if place == "waiting":
                queue.fail(item.id, error=text, delay_seconds=1000, **held)
            elif place == "dead":
                queue.fail(item.id, error=ValueError(text), retryable=False, **held)
            elif place == "finished":
                queue.complete(item.id, result={"secret": text}, **held)
    for each in range(number):
        now = queue.moves.now() + timedelta(seconds=each)
        rows(WorkerProcess).create(
            boot=f"boot-{rows(WorkerProcess).count()}",
            name=text,
            host=text,
            pid=1,
            queues=[text],
            started_at=now,
            seen_at=now,
        )


def reader(client, *codenames):
    """Log *client* in as a member of staff with these permissions of the app."""
    user = get_user_model().objects.create_user("reader", password="reader", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client.force_login(user)
    return user


@pytest.fixture(params=["default", "postgresql"], autouse=True)
def store(request, settings):
    """The alias of the database in which the queue lies; users and sessions lie in the default."""
    settings.WORKQUEUE = {"DATABASE": request.param}
    return request.param


def rows(model):
    return model._base_manager.using(get_queue().using).order_by("pk")


@pytest.fixture
def queries(store):
    """Capture the statements on the queue's database."""
    return lambda: CaptureQueriesContext(connections[store])


VIEW = [f"view_{model._meta.model_name}" for model in MODELS]


@by_model
def test_lists_and_pages_escape_hostile_text(model, admin_client):
    fill(1)
    pages = [address(model)]
    pages += [address(model, "change", row.pk) for row in rows(model)]
    assert len(pages) > 1
    for page in pages:
        answer = admin_client.get(page)
        assert answer.status_code == 200
        text = answer.content.decode()
        assert HOSTILE not in text
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert" in text


@by_model
def test_anonymous_is_sent_to_the_login(model, client):
    answer = client.get(address(model))
    assert answer.status_code == 302
    assert answer["Location"].startswith(reverse("admin:login"))


@by_model
def test_staff_without_the_permission_is_refused(model, client):
    reader(client)
    assert client.get(address(model)).status_code == 403


@by_model
def test_nothing_can_be_added_changed_or_deleted_not_even_by_a_superuser(model, admin_client):
    fill(1)
    row = rows(model).first()
    before = list(rows(model).values())
    data = {"_selected_action": [row.pk], "action": "delete_selected", "post": "yes", "_save": "1"}
    for page in (
        address(model, "add"),
        address(model, "change", row.pk),
        address(model, "delete", row.pk),
    ):
        assert admin_client.post(page, data).status_code == 403
    admin_client.post(address(model), data)
    assert list(rows(model).values()) == before


def our(queries):
    return sum('FROM "django_workqueue_' in query["sql"] for query in queries)


@by_model
def test_a_list_of_many_costs_no_more_queries_than_a_list_of_one(model, admin_client, queries):
    fill(1)
    with queries() as few:
        admin_client.get(address(model))
    fill(6, text="plain")
    with queries() as many:
        answer = admin_client.get(address(model))
    assert len(answer.context["cl"].result_list) >= 7
    assert our(many) == our(few) == 2


@by_model
def test_lists_load_no_payload_result_or_traceback(model, admin_client, queries):
    fill(1)
    with queries() as asked:
        admin_client.get(address(model))
    selected = " ".join(query["sql"] for query in asked)
    assert "django_workqueue" in selected
    assert not re.search(r'"(payload|result|traceback)"', selected)


@pytest.mark.parametrize(
    ("model", "shown_as"), [(QueueItem, "content"), (Finished, "result"), (Failure, "traceback")]
)
def test_payloads_results_and_tracebacks_need_their_permission(model, shown_as, client):
    fill(1, text="geheim")
    [*_, row] = rows(model)
    page = address(model, "change", row.pk)
    user = reader(client, *VIEW)
    assert f"field-{shown_as}" not in client.get(page).content.decode()
    user.user_permissions.add(Permission.objects.get(codename="view_payload"))
    assert f"field-{shown_as}" in client.get(page).content.decode()


def test_no_column_can_be_filtered_by_in_the_address(client):
    fill(1, text="geheim")
    reader(client, *VIEW)
    for lookup in ("payload__secret=geheim", "payload__contains=x", "tenant=geheim"):
        assert client.get(f"{address(QueueItem)}?{lookup}").status_code == 400


def test_an_undecodable_payload_does_not_hide_its_item(admin_client, store):
    fill(1)
    row = rows(QueueItem).first()
    unreadable = '{"n": ' + "9" * 5000 + "}"  # JSON, with a number that Python refuses
    with connections[store].cursor() as cursor:
        cursor.execute("UPDATE django_workqueue_queueitem SET payload = %s", [unreadable])
    answer = admin_client.get(address(QueueItem, "change", row.pk))
    assert answer.status_code == 200
    assert "9" * 100 in answer.content.decode()


def found(client, model, term):
    answer = client.get(address(model), {"q": term})
    assert answer.status_code == 200
    return [row.pk for row in answer.context["cl"].result_list]


def test_items_are_found_by_job_id_tenant_or_tenant_and_item_id(admin_client):
    queue = get_queue()
    wanted, sibling, other = queue.enqueue_many(
        WorkItem(tenant=tenant, id=id)
        for tenant, id in (("Acme Inc", "order-1"), ("Acme Inc", "order-2"), ("Else", "order-1"))
    )
    assert found(admin_client, QueueItem, f" {wanted.job_id} ") == [wanted.job_id]
    assert found(admin_client, QueueItem, "Acme Inc order-1") == [wanted.job_id]
    assert found(admin_client, QueueItem, "Else") == [other.job_id]
    assert found(admin_client, QueueItem, "else") == []
    assert found(admin_client, QueueItem, "") == [
        other.job_id,
        sibling.job_id,
        wanted.job_id,
    ]


@by_model
@pytest.mark.parametrize("term", ["9" * 30, "²", "nobody", "%", "' OR 1=1 --", "\x00"])
def test_odd_search_terms_find_nothing_and_break_nothing(model, term, admin_client):
    fill(1)
    shown = found(admin_client, model, term)
    assert shown == [] or term == "\x00"  # refused by Django's form, which then shows all


@by_model
@pytest.mark.parametrize("key", ["9" * 30, "nobody", "_00"])
def test_odd_addresses_lead_back(model, key, admin_client):
    assert admin_client.get(address(model, "change", key)).status_code == 302


def test_each_item_shows_its_state(admin_client):
    fill(1)
    shown = admin_client.get(address(QueueItem)).content.decode()
    states = re.findall(r'field-state">(\w+)', shown)
    assert sorted(states) == ["claimed", "completed", "dead_lettered", "queued", "queued"]


def test_a_dead_letter_shows_its_last_error(admin_client):
    fill(1, text="too bad")
    shown = admin_client.get(address(DeadLetter)).content.decode()
    assert "ValueError: too bad" in shown


def test_a_list_counts_and_pages_no_further_than_its_cap(admin_client, monkeypatch, queries):
    monkeypatch.setattr(CappedPaginator, "cap", 3)
    get_queue().enqueue_many(WorkItem(tenant="acme") for _ in range(3))
    answer = admin_client.get(address(QueueItem))
    assert "Only the first 3 are listed" not in answer.content.decode()
    get_queue().enqueue_many(WorkItem(tenant="acme") for _ in range(4))
    with queries() as asked:
        answer = admin_client.get(address(QueueItem))
    assert answer.context["cl"].result_count == 3
    assert "Only the first 3 are listed" in answer.content.decode()
    counts = [query["sql"] for query in asked if "COUNT" in query["sql"]]
    assert counts
    assert all("LIMIT 4" in count for count in counts)


def test_the_demo_project_leads_to_the_admin():
    answer = Client().get("/")
    assert answer.status_code == 302
    assert answer["Location"] == reverse("admin:index")
