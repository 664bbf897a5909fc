"""
The contract in the plainest code: what other queues are compared with, and what a user's
tests can run on. What each verb means is written in `contract.WorkQueue`.
"""

from django_workqueue.memory.queue import MemoryWorkQueue
from django_workqueue.memory.store import Clock, SystemClock

__all__ = ["Clock", "MemoryWorkQueue", "SystemClock"]
