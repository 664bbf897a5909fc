"""Addresses, without a slash at the end. Mount them at ``queue/``."""

from __future__ import annotations

from django.urls import path
from rest_framework.routers import SimpleRouter

from django_workqueue.api.fleet import (
    DeadLetterViewSet,
    HoldViewSet,
    SchemaViewSet,
    StatsViewSet,
    TenantViewSet,
    WorkerViewSet,
)
from django_workqueue.api.jobs import JobViewSet

app_name = "workqueue"

router = SimpleRouter(trailing_slash=False)
router.register("jobs", JobViewSet, basename="job")

urlpatterns = [
    path("stats", StatsViewSet.as_view({"get": "list"}), name="stats"),
    path("dead-letters", DeadLetterViewSet.as_view({"get": "list"}), name="dead-letters"),
    path("workers", WorkerViewSet.as_view({"get": "list"}), name="workers"),
    path("tenants", TenantViewSet.as_view({"get": "list"}), name="tenants"),
    path(
        "holds",
        HoldViewSet.as_view({"get": "list", "post": "create", "delete": "lift"}),
        name="holds",
    ),
    path("schema", SchemaViewSet.as_view({"get": "list"}), name="schema"),
    *router.urls,
]
