"""
The database queue: the contract over the moves.

What is decided here: which policy is stamped, what a payload may be, what a late caller is
told, and that trouble of the database becomes `QueueUnavailableError`.
"""

from django_workqueue.queues.queue import DatabaseWorkQueue, get_queue

__all__ = ["DatabaseWorkQueue", "get_queue"]
