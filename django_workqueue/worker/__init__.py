"""
The workers: `supervisor` starts processes and keeps their leases, `process` claims and
settles, `slots` runs the handlers.
"""
