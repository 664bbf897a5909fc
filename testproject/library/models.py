"""What the demo's handler finds out about a module."""

from django.db import models


class Report(models.Model):
    """The figures of one module, found in one run of the demo."""

    run = models.CharField(max_length=20)
    path = models.CharField(max_length=500)
    module = models.CharField(max_length=200)
    # The package that the module belongs to: the tenant of its item.
    package = models.CharField(max_length=200)
    lines = models.PositiveIntegerField()
    classes = models.PositiveIntegerField()
    functions = models.PositiveIntegerField()
    longest_function = models.CharField(max_length=200, blank=True, default="")
    longest_function_lines = models.PositiveIntegerField(default=0)
    # A number, not a foreign key: the item goes when its retention ends, the report stays.
    job = models.BigIntegerField()
    # More than 1 would mean that a redelivered item's earlier work had been committed.
    times_written = models.PositiveIntegerField(default=1)

    class Meta:
        constraints = [
            models.UniqueConstraint(name="library_one_report_a_run", fields=["run", "path"]),
        ]
        indexes = [models.Index(name="library_largest_of_a_run", fields=["run", "-lines"])]

    def __str__(self) -> str:
        return self.module
