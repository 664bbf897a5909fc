"""What the handlers of the tests leave behind."""

from django.db import models


class Trace(models.Model):
    """That a handler did something: by it a test sees what ran, where and how often."""

    what = models.CharField(max_length=50)
    item = models.CharField(max_length=200)
    pid = models.IntegerField()
    fence = models.IntegerField()
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        app_label = "workerapp"
