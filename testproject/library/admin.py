"""The reports in the admin, to read."""

from django.contrib import admin
from django.http import HttpRequest

from library.models import Report


@admin.register(Report)
class ReportAdmin(admin.ModelAdmin):
    """Only the demo's handler writes reports."""

    list_display = [
        "module",
        "package",
        "lines",
        "classes",
        "functions",
        "longest_function",
        "longest_function_lines",
        "times_written",
        "run",
    ]
    list_filter = ["run"]
    search_fields = ["module"]
    ordering = ["run", "-lines"]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Report | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Report | None = None) -> bool:
        return False
