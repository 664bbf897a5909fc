"""
The operator's surface over HTTP, on Django REST framework.

Mount it with ``path("queue/", include("django_workqueue.api.urls"))``.
"""
