"""`manage.py serve`: the admin on what the demo left, with a login that it prints."""

import secrets
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser

# A name that nobody has by chance: the password of the user with this name is replaced.
USERNAME = "workqueue-demo"


class Command(BaseCommand):
    """Migrates, sees to it that somebody can log in, and runs the development server."""

    help = "Open the admin on 127.0.0.1, with a login that is printed."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")

    def handle(self, *args: Any, **options: Any) -> None:
        call_command("migrate", verbosity=0)
        address = f"127.0.0.1:{options['port']}"
        self.stdout.write(f"The admin: http://{address}/admin/\n{self._login()}\n")
        self.stdout.flush()
        call_command("runserver", address, use_reloader=False)

    def _login(self) -> str:
        """Return with what to log in; make the demo's user unless there is a superuser."""
        users = get_user_model()._default_manager
        others = users.filter(is_superuser=True).exclude(username=USERNAME)
        user = users.filter(username=USERNAME).first()
        if user is None and others.exists():
            return "Log in as a superuser of this database."
        password = secrets.token_urlsafe(9)
        if user is None:
            users.create_superuser(USERNAME, password=password)
        else:
            user.set_password(password)
            user.save(update_fields=["password"])
        return f"User: {USERNAME}   Password: {password}   (a new one each time)"
