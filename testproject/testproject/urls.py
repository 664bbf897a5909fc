"""The demo project's addresses: the admin, and the queue over HTTP."""

from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("queue/", include("django_workqueue.api.urls")),
]
