"""The database queue keeps the contract on both databases."""

from collections.abc import Iterator

import pytest

from django_workqueue import QueuePolicy
from django_workqueue.conformance import WorkQueueConformance
from django_workqueue.doctor import examine
from django_workqueue.testing import DatabaseTestQueue, make_queue

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


class DatabaseConformance(WorkQueueConformance):
    backend: str

    def make_queue(self, policy: QueuePolicy | None = None) -> DatabaseTestQueue:
        self.alias = (queue := make_queue(self.backend, policy)).using
        return queue

    def advance(self, queue: DatabaseTestQueue, seconds: float) -> None:
        queue.advance(seconds)

    @pytest.fixture(autouse=True)
    def doctor_finds_nothing(self) -> Iterator[None]:
        yield
        if alias := getattr(self, "alias", None):
            assert examine(alias) == []


class TestSQLite(DatabaseConformance):
    backend = "sqlite"


class TestPostgreSQL(DatabaseConformance):
    backend = "postgresql"
