"""
Settings of the demo project: for one machine and its loopback address, nothing else.

Two environment variables choose the database. ``DATABASE_URL`` (``postgres://…``) names a
PostgreSQL database; without it, ``WORKQUEUE_DEMO_DB`` is the path of the SQLite file.
"""

import os
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "the demo's own key: it is public, so it protects nothing"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]"]

if url := os.environ.get("DATABASE_URL"):
    import dj_database_url

    DATABASES = {"default": dj_database_url.parse(url, conn_max_age=60)}
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ.get("WORKQUEUE_DEMO_DB") or BASE_DIR / "demo.sqlite3",
            # Otherwise a worker would connect anew for each item.
            "CONN_MAX_AGE": 60,
            "OPTIONS": {
                # A transaction that reads, and writes only then, fails at once if another
                # process wrote in between. One that is immediate waits for its turn.
                "transaction_mode": "IMMEDIATE",
                # Seconds of such waiting.
                "timeout": 20,
                # With a write-ahead log nobody waits to read. `synchronous` stays FULL, its
                # default: NORMAL is faster, but a power cut could undo what was accepted.
                "init_command": "PRAGMA journal_mode=WAL;",
            },
        }
    }
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rest_framework",
    "django_workqueue",
    "library",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"

WORKQUEUE = {
    "QUEUES": {
        "demo": {
            # Longer than SQLite lets a claim wait for its turn to write, or the claim would be
            # over before it began. How fast a death is noticed doesn't depend on it.
            "lease_seconds": 30,
            # Short, because people watch: what keeps failing is given up within seconds.
            "max_attempts": 3,
            "backoff_seconds": 0.5,
            "backoff_cap_seconds": 2,
        },
    },
    # Few threads: they share the interpreter, and on SQLite the turn to write as well.
    "WORKER": {"concurrency": 2, "stop_timeout_seconds": 5, "reap_seconds": 1},
    # Nobody but this machine reaches it, and there is nothing to hide.
    "API": {"open": True},
}
