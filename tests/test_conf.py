"""The WORKQUEUE setting and its system checks. Those of the database: test_checks."""

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from django_workqueue.conf import get_settings


def test_without_a_setting_the_defaults_are_in_force(settings):
    del settings.WORKQUEUE
    found = get_settings()
    assert found.enabled
    assert list(found.queues) == ["default"]
    assert (found.policy.lease_seconds, found.policy.max_attempts) == (60, 5)
    assert (found.worker.processes, found.worker.stop_timeout_seconds) == (1, 30)


def test_a_queues_own_policy_stands_on_the_policy_of_all(settings):
    settings.WORKQUEUE = {
        "POLICY": {"max_attempts": 2, "lease_seconds": 90},
        "QUEUES": {"default": {}, "email": {"max_attempts": 1}},
    }
    found = get_settings()
    email = found.policy_for("email")
    assert (email.max_attempts, email.lease_seconds) == (1, 90)
    assert found.policy_for("nowhere").max_attempts == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "WORKQUEUE must be a dictionary"),
        ({"QUEUE": {}}, "no key 'QUEUE'. Did you mean 'QUEUES'"),
        ({"POLICY": {"lease": 1}}, "POLICY has no key 'lease'"),
        ({"POLICY": {"lease_seconds": 0}}, "POLICY: lease_seconds"),
        ({"QUEUES": ["email"]}, "QUEUES must be a dictionary"),
        ({"QUEUES": {"email": {"max_atempts": 1}}}, "Did you mean 'max_attempts'"),
        ({"QUEUES": {"email": {"max_attempts": "1"}}}, "max_attempts: must be an integer"),
        ({"QUEUES": {"": {}}}, "QUEUES: must not be empty"),
        ({"QUEUES": {}}, "QUEUES must name at least one queue"),
        ({"WORKER": {"processes": 0}}, "WORKER: processes"),
        ({"WORKER": {"reap_seconds": -5}}, "WORKER: reap_seconds"),
        ({"API": {"opn": True}}, "API has no key 'opn'. Did you mean 'open'"),
        ({"API": {"open": "yes"}}, "API: open: must be True or False"),
        ({"API": {"admin_scope": " "}}, "API: admin_scope: must not be blank"),
        ({"API": {"scope_claims": "scope"}}, "API: scope_claims: must be a list of names"),
        ({"API": {"scope_claims": []}}, "API: scope_claims: must be a list of names"),
        ({"API": {"scope_claims": [1]}}, "API: scope_claims"),
        ({"API": {"redact": print}}, "API: redact: must be text"),
        ({"DEPLOYMENT_ID": "x" * 101}, "DEPLOYMENT_ID"),
        ({"DEPLOYMENT_ID": 0}, "DEPLOYMENT_ID: must be text"),
        ({"ENABLED": "yes"}, "ENABLED must be True or False"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it_and_a_failed_check(settings, value, message):
    settings.WORKQUEUE = value
    with pytest.raises(ImproperlyConfigured, match=message.replace(".", r"\.")):
        get_settings()
    [error] = [each for each in run_checks() if each.id == "django_workqueue.E001"]
    assert message in error.msg
    assert error.hint


@pytest.mark.parametrize("path", ["nowhere.at_all", "django_workqueue.conf.SETTING", "print"])
def test_what_is_to_redact_must_be_there_and_be_callable(settings, path):
    settings.WORKQUEUE = {"API": {"redact": path}}
    [error] = [each for each in run_checks() if each.id == "django_workqueue.E010"]
    assert path in error.msg
    settings.WORKQUEUE = {"API": {"redact": "copy.copy"}}
    assert run_checks() == []


def test_an_open_api_is_warned_of_before_it_is_deployed(settings):
    def ids(**more):
        return [each.id for each in run_checks(**more) if each.id.startswith("django_workqueue")]

    assert ids(include_deployment_checks=True) == []
    settings.WORKQUEUE = {"API": {"open": True}}
    assert ids() == []
    assert ids(include_deployment_checks=True) == ["django_workqueue.W003"]
    settings.WORKQUEUE = {"API": {"open": 1}}
    assert ids(include_deployment_checks=True) == ["django_workqueue.E001"]


def test_a_drain_that_outlasts_a_lease_is_a_failed_check(settings):
    settings.WORKQUEUE = {
        "QUEUES": {"default": {}, "quick": {"lease_seconds": 20}},
        "WORKER": {"stop_timeout_seconds": 25},
    }
    [error] = [each for each in run_checks() if each.id == "django_workqueue.E002"]
    assert "'quick'" in error.msg
    with pytest.raises(SystemCheckError, match="quick"):
        call_command("check")


def test_a_drain_is_compared_with_the_lease_that_claims_really_have(settings):
    settings.WORKQUEUE = {"POLICY": {"lease_seconds": 60, "max_lease_seconds": 10}}
    assert [each.id for each in run_checks()] == ["django_workqueue.E002"]


def test_naive_times_are_a_failed_check(settings):
    settings.USE_TZ = False
    assert "django_workqueue.E005" in [each.id for each in run_checks()]


def test_a_database_that_is_not_configured_is_a_failed_check(settings):
    settings.WORKQUEUE = {"DATABASE": "nowhere"}
    [error] = [each for each in run_checks() if each.id == "django_workqueue.E004"]
    assert "'nowhere'" in error.msg
