"""What ``manage.py workqueue`` does, by theme: each module has some of its verbs."""
