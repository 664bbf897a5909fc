"""The verbs on queues, tenants and whole tables: holds, retention and the doctor."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, Final

from django.core.management.base import CommandError

from django_workqueue.doctor import NAMED, find
from django_workqueue.doctor.findings import Finding, Kind
from django_workqueue.doctor.repair import Repair, repair
from django_workqueue.management.console.status import hold_line, hold_object
from django_workqueue.management.console.text import as_json, number_of, printable
from django_workqueue.management.console.verb import (
    UNUSABLE,
    WRONG,
    Console,
    Verb,
    actor,
    add_actor,
    add_json,
    natural,
    reason,
)
from django_workqueue.overview import known_queues, no_queue

# Holds.


def _add_held(parser: ArgumentParser) -> None:
    parser.add_argument("--queue", help="The queue; with --tenant: only of this tenant.")
    parser.add_argument("--tenant", help="The tenant; without --queue: in all queues.")


def _add_hold_arguments(parser: ArgumentParser) -> None:
    _add_held(parser)
    add_actor(parser, reason_required=True)
    add_json(parser)


def _add_unhold_arguments(parser: ArgumentParser) -> None:
    _add_held(parser)
    add_actor(parser)
    add_json(parser)


def _held(options: dict[str, Any]) -> dict[str, Any]:
    if options["queue"] is None and options["tenant"] is None:
        raise CommandError("name a --queue, a --tenant or both", returncode=UNUSABLE)
    return {name: options[name] for name in ("queue", "tenant")}


def _hold(console: Console, options: dict[str, Any]) -> None:
    named, by, why = _held(options), actor(options), reason(options)
    if not why:
        raise CommandError("--reason: must not be blank", returncode=UNUSABLE)
    before = console.queue.holds()
    hold = console.queue.hold(**named, by=by, reason=why)
    # Another's that came between has another's words.
    was_there = hold in before or (hold.by, hold.reason) != (by, why)
    if options["json"]:
        console.out(as_json({"hold": hold_object(hold), "already": was_there}))
    else:
        console.out(("already: " if was_there else "") + hold_line(hold))
    known = known_queues(console.queue)
    if hold.queue is not None and hold.queue not in known:
        told = f"it is held, but {no_queue(hold.queue, known)}"
        console.stderr.write(printable(told), console.style.WARNING)


def _unhold(console: Console, options: dict[str, Any]) -> None:
    hold = console.queue.unhold(**_held(options), by=actor(options), reason=reason(options))
    if options["json"]:
        console.out(as_json({"lifted": hold and hold_object(hold)}))
    elif hold is not None:
        console.out(f"lifted: {hold_line(hold)}")
    if hold is None:
        raise CommandError("there is no hold of just that; see workqueue holds", returncode=WRONG)


def _holds(console: Console, options: dict[str, Any]) -> None:
    holds = console.queue.holds()
    if options["json"]:
        console.out(as_json({"holds": [hold_object(hold) for hold in holds]}))
        return
    for hold in holds:
        console.out(hold_line(hold))
    if not holds:
        console.out("nothing is held")


HOLD: Final = Verb(
    help="Stop serving a queue, a tenant, or a tenant in a queue.",
    description=(
        "What runs goes on. A hold that is there already stays as it is. A queue that nobody has "
        "used so far is held too, with a warning."
    ),
    add_arguments=_add_hold_arguments,
    run=_hold,
)
UNHOLD: Final = Verb(
    help="Serve again what was held with the same --queue and --tenant.",
    description="Other holds of the queue or the tenant stay. Exits with 1 if there is no such.",
    add_arguments=_add_unhold_arguments,
    run=_unhold,
)
HOLDS: Final = Verb(help="Show all holds.", add_arguments=add_json, run=_holds)

# Retention.


def _add_prune_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        type=natural,
        metavar="NUMBER",
        help=(
            "Delete at most so many items in all, whether completed, cancelled or dead letters; "
            "their failures go with them, uncounted. Default: all whose retention is over."
        ),
    )
    add_json(parser)


def _prune(console: Console, options: dict[str, Any]) -> None:
    gone = console.queue.prune(limit=options["limit"])
    told = as_json({"deleted": gone}) if options["json"] else f"deleted {number_of(gone, 'item')}"
    console.out(told)


PRUNE: Final = Verb(
    help="Delete the items whose retention is over.",
    description=(
        "Completed and cancelled items, and dead letters only where their policy says so; in "
        "small batches, those first that are over the longest. Workers do the same hourly."
    ),
    add_arguments=_add_prune_arguments,
    run=_prune,
)

# The doctor.


def _add_doctor_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repair", action="store_true", help="Repair what can be repaired safely, and look again."
    )
    parser.add_argument(
        "--by", help="Who repairs; kept in the audit. Default: the name of the system's user."
    )
    add_json(parser)


def _doctor(console: Console, options: dict[str, Any]) -> None:
    using, repairs = console.queue.using, []
    if options["repair"]:
        for each in repair(using, actor(options)):
            repairs.append(each)
            if not options["json"]:
                console.out(_repair_line(each))
    findings = find(using)
    if options["json"]:
        told = {
            "database": using,
            "sound": not findings,
            "repairs": [_repair_object(each) for each in repairs],
            "findings": [_finding_object(each) for each in findings],
        }
        console.out(as_json(told))
    else:
        for kind in Kind:
            _explain(console, [finding for finding in findings if finding.kind is kind])
    if findings:
        advice = "" if options["repair"] else "; --repair repairs what can be repaired safely"
        told_all = f", at most {NAMED} of a kind" if len(findings) >= NAMED else ""
        raise CommandError(
            f"workqueue doctor: {number_of(len(findings), 'finding')}{told_all}{advice}",
            returncode=WRONG,
        )
    if not options["json"]:
        console.out(console.style.SUCCESS("workqueue doctor: every item is in one place"))


def _explain(console: Console, findings: list[Finding]) -> None:
    """Tell the findings of a kind, and what they mean."""
    for finding in findings:
        console.out(console.style.ERROR(printable(str(finding))))
    for finding in findings[:1]:
        console.out(f"    means:  {finding.meaning}")
        console.out(f"    repair: {finding.remedy}")


def _repair_line(each: Repair) -> str:
    outcome = f"repaired: {each.done}" if each.done else f"not repaired: {each.why}"
    return printable(f"{each.finding}: {outcome}")


def _finding_object(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "queue": finding.queue,
        "tenant": finding.tenant or None,
        "id": finding.item_id or None,
        "job_id": finding.job_id,
        "problem": finding.problem,
        "meaning": finding.meaning,
        "repair": finding.remedy,
    }


def _repair_object(each: Repair) -> dict[str, Any]:
    told = _finding_object(each.finding)
    return told | {"repaired": bool(each.done), "done": each.done, "why_not": each.why}


DOCTOR: Final = Verb(
    help="Prove that every item is in one place; explain, and repair, what is wrong.",
    description=(
        "Reads whole tables, so it takes its time on large ones. Without --repair it only reads. "
        "Exits with 0 only if all is well in the end."
    ),
    add_arguments=_add_doctor_arguments,
    run=_doctor,
)
