"""Django settings of this project's own tests: one SQLite database, one PostgreSQL database."""

import json
import os
from importlib.util import find_spec

SECRET_KEY = "for tests only, and long enough for every algorithm that signs a token"
DEBUG = False
USE_TZ = True
# Neither the database's zone nor a whole number of hours from it: a naive time shows.
TIME_ZONE = "Asia/Kathmandu"

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL;",
        },
    },
    "postgresql": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "workqueue",
        # The suite starts its server with the first test that asks for a database, and writes
        # the address here. Until then nobody's own server must be reached by accident.
        "HOST": "/nonexistent/the-suite-has-not-started-its-server",
    },
}
# Processes that a test starts find its databases here (the fixture `process_environment`).
for alias, changes in json.loads(os.environ.get("WORKQUEUE_TEST_DATABASES", "{}")).items():
    DATABASES[alias].update(changes)
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "rest_framework",
    "django_workqueue",
    "tests.workerapp",
]
# Of a process that a test starts with other settings than the default ones.
WORKQUEUE = json.loads(os.environ.get("WORKQUEUE_TEST_SETTINGS", "{}"))
if find_spec("library"):
    INSTALLED_APPS.append("library")

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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
STATIC_URL = "static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
