"""What the queue costs: scenarios on a PostgreSQL database of their own, for `manage.py bench`."""


class BenchError(Exception):
    """The benchmark can't go on, or its outcome is wrong; the message says why."""
