"""How long what has ended is kept, and what then becomes of its id: prune."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from django_workqueue.conformance._bench import Bench, refused
from django_workqueue.exceptions import LeaseLostError, WorkItemNotFoundError
from django_workqueue.items import WorkItem, WorkState

YEARS = 10 * 366 * 86_400


class Pruning(Bench):
    def left_in(self, state: WorkState, **fields: Any) -> WorkItem:
        """Return an item that has ended in *state*, where no other is due."""
        item = self.in_state(state, **fields)
        assert item.terminal
        return item

    def gone(self, item: WorkItem) -> bool:
        """Return whether this very acceptance is deleted."""
        try:
            self.queue.get(item.id, tenant=item.tenant, job_id=item.job_id)
        except WorkItemNotFoundError:
            return True
        return False

    def test_finished_items_go_at_the_end_of_their_retention(self) -> None:
        """SPEC 6: at its very end."""
        self.start(retention_seconds=1000)
        items = [
            self.left_in(WorkState.COMPLETED),
            self.left_in(WorkState.CANCELLED),
            self.operate("discard", self.bury()),
        ]
        self.wait(900)
        assert self.queue.prune() == 0
        self.expect(completed=1, cancelled=2)
        self.wait(100)
        assert self.queue.prune() == 3
        for item in items:
            assert self.gone(item)
            with refused(WorkItemNotFoundError, item_id=item.id, tenant="acme"):
                self.look(item)
        self.expect()
        assert self.queue.prune() == 0

    def test_a_retention_of_0_keeps_nothing(self) -> None:
        """SPEC 6."""
        self.start(retention_seconds=0, dead_letter_retention_seconds=0)
        for state in (WorkState.COMPLETED, WorkState.CANCELLED, WorkState.DEAD_LETTERED):
            item = self.left_in(state)
            assert self.look(item) == item
            assert self.queue.prune() == 1
            assert self.gone(item)
        assert self.queue.dead_letters(tenant="acme") == ()

    def test_without_a_retention_items_are_kept_for_ever(self) -> None:
        """SPEC 6."""
        self.start(retention_seconds=None, dead_letter_retention_seconds=None)
        items = [self.left_in(state) for state in WorkState if state.terminal]
        self.wait(YEARS)
        assert self.queue.prune() == 0
        assert [self.look(item) for item in items] == items

    def test_dead_letters_stay_until_an_operator_acts(self) -> None:
        """SPEC 6: nothing falls out of the dead letter over a weekend."""
        self.start(retention_seconds=10)
        dead = self.bury()
        self.wait(YEARS)
        assert self.queue.prune() == 0
        assert self.queue.dead_letters(tenant="acme") == (dead,)
        self.operate("discard", dead)
        assert self.queue.prune() == 0
        self.wait(10)
        assert self.queue.prune() == 1

    def test_dead_letters_go_at_the_end_of_their_own_retention(self) -> None:
        """SPEC 6."""
        self.start(retention_seconds=100, dead_letter_retention_seconds=1000)
        dead, done = self.bury(), self.left_in(WorkState.COMPLETED)
        self.wait(900)
        assert self.queue.prune() == 1
        assert (self.gone(done), self.gone(dead)) == (True, False)
        self.wait(100)
        assert self.queue.prune() == 1
        assert self.gone(dead)
        self.expect()

    def test_a_retention_counts_from_the_end_of_the_item(self) -> None:
        """SPEC 6: not from its acceptance."""
        self.start(retention_seconds=1000, dead_letter_retention_seconds=1000, lease_seconds=3600)
        stored = self.put_for(["acme"] * 3, enqueued_at=self.now() - timedelta(days=30))
        done, dead, cancelled = self.take_many(3)
        self.wait(2000)
        self.say("complete", done)
        self.say("fail", dead, retryable=False)
        self.operate("cancel", cancelled)
        self.say("release", cancelled)
        self.wait(900)
        assert self.queue.prune() == 0
        self.wait(100)
        assert self.queue.prune() == len(stored)

    def test_a_live_item_never_goes(self) -> None:
        """SPEC 6: queued, scheduled, claimed or paused."""
        self.start(retention_seconds=0, dead_letter_retention_seconds=0, backoff_seconds=0)
        paused = self.in_state(WorkState.PAUSED)
        held = self.take_new()
        self.operate("cancel", self.take_new("asked"))
        self.say("fail", self.take_new(), delay_seconds=86_400 * 365)
        self.put()
        self.wait(86_400 * 30)
        assert self.queue.prune() == 0
        self.expect(paused=1, claimed=2, depth=2, due=1)
        assert [self.look(item) for item in (paused, held)] == [paused, held]

    def test_an_item_that_was_requeued_never_goes(self) -> None:
        """SPEC 6: however long ago it had ended; its next end counts anew."""
        self.start(retention_seconds=1000, dead_letter_retention_seconds=1000)
        items = [self.bury(), self.operate("discard", self.bury()), self.put()]
        self.operate("cancel", items[2])
        self.wait(YEARS)
        for item in items:
            self.operate("requeue", item)
        assert self.queue.prune() == 0
        self.wait(5000)
        assert self.queue.prune() == 0
        for item in self.take_many(3):
            self.say("complete", item)
        self.wait(900)
        assert self.queue.prune() == 0
        self.wait(100)
        assert self.queue.prune() == 3

    def test_at_most_limit_go_those_first_that_are_longest_over(self) -> None:
        """SPEC 6: in the order of their ends, not of their acceptance."""
        self.start(retention_seconds=100)
        self.put_for(["acme"] * 5)
        items = list(reversed(self.take_many(5)))
        for item in items:
            self.say("complete", item)
            self.wait(1)
        self.wait(1000)
        assert self.queue.prune(limit=2) == 2
        assert [self.gone(item) for item in items] == [True] * 2 + [False] * 3
        assert self.queue.prune(limit=1) == 1
        assert [self.gone(item) for item in items] == [True] * 3 + [False] * 2
        self.expect(completed=2)
        assert self.queue.prune(limit=9) == 2
        assert self.queue.prune(limit=9) == 0

    def test_the_limit_is_of_all_that_go(self) -> None:
        """SPEC 6: finished items and dead letters together."""
        self.start(retention_seconds=0, dead_letter_retention_seconds=0)
        for state in [state for state in WorkState if state.terminal] * 2:
            self.left_in(state)
        assert [self.queue.prune(limit=4), self.queue.prune(limit=4), self.queue.prune()] == [
            4,
            2,
            0,
        ]
        self.expect()

    def test_every_queue_and_tenant_is_pruned(self) -> None:
        """SPEC 6."""
        self.start(retention_seconds=0)
        for queue in ("mail", "sms"):
            for tenant in "ab":
                self.left_in(WorkState.COMPLETED, tenant=tenant, queue=queue)
        self.put(queue="sms")
        assert self.queue.prune() == 4
        self.expect("mail")
        self.expect("sms", depth=1, due=1)

    def test_a_great_many_go_in_one_call(self) -> None:
        """SPEC 6: in batches."""
        self.start(dead_letter_retention_seconds=0, lease_seconds=10, max_attempts=1)
        self.put_for(["acme"] * 1100)
        self.take_many(1100)
        self.wait(10)
        assert len(self.queue.reap()) == 1100
        assert self.queue.prune(limit=1050) == 1050
        assert self.queue.prune() == 50
        self.expect()

    def test_what_was_counted_stays_counted(self) -> None:
        """SPEC 4: reaped and suppressed duplicates only grow."""
        self.start(dead_letter_retention_seconds=0, lease_seconds=10, max_attempts=1)
        self.take_new("i-1")
        self.put("i-1")
        self.wait(10)
        self.queue.reap()
        assert self.queue.prune() == 1
        assert (self.figures().reaped, self.figures().duplicates_suppressed) == (1, 1)


class IdsAfterPruning(Bench):
    def test_a_pruned_items_id_and_key_are_free(self) -> None:
        """SPEC 3."""
        self.start(retention_seconds=0)
        done = self.in_state(WorkState.COMPLETED, "i-1", dedupe_key="k")
        assert self.queue.prune() == 1
        again = self.put("i-1", dedupe_key="k")
        assert (again.state, again.attempts, again.failures) == (WorkState.QUEUED, 0, ())
        assert again.job_id != done.job_id
        assert self.take().id == "i-1"

    def test_an_id_goes_to_its_newest_older_acceptance(self) -> None:
        """SPEC 3, 4: which every verb then means, and which goes on from the last fence."""
        self.start(retention_seconds=0)
        self.bury("i-1")
        newest = self.bury("i-1", dedupe_key="k")
        self.in_state(WorkState.COMPLETED, "i-1", dedupe_key="k")
        assert self.queue.prune() == 1
        assert self.look(newest) == replace(newest, fence=3)
        back = self.operate("requeue", newest)
        assert self.put("i-1") == self.put("i-2", dedupe_key="k") == back
        held = self.take()
        assert (held.job_id, held.fence) == (newest.job_id, 4)

    def test_an_id_goes_on_from_acceptance_to_acceptance(self) -> None:
        """SPEC 4: of a requeued one to the one that it had taken the id from."""
        self.start(retention_seconds=0)
        first, second, third = (self.bury("i-1") for _ in range(3))
        self.operate("requeue", first, job_id=first.job_id)
        self.say("complete", self.take())
        for following in (third, second):
            assert self.queue.prune() == 1
            assert self.look(first) == replace(following, fence=4)
            self.operate("discard", following)
        assert self.queue.prune() == 1
        with refused(WorkItemNotFoundError, item_id="i-1"):
            self.look(first)

    def test_an_older_acceptance_goes_without_its_id(self) -> None:
        """SPEC 3: that stays with the one that has it."""
        self.start(retention_seconds=100)
        done = self.in_state(WorkState.COMPLETED, "i-1", dedupe_key="k")
        self.wait(100)
        live = self.take_new("i-1", dedupe_key="k")
        assert self.queue.prune() == 1
        with refused(WorkItemNotFoundError):
            self.queue.get("i-1", tenant="acme", job_id=done.job_id)
        assert self.look(done) == live
        assert self.put("i-1") == self.put("i-2", dedupe_key="k") == live
        assert self.say("complete", live).fence == 2

    def test_an_id_stays_within_its_tenant(self) -> None:
        """SPEC 1.6."""
        self.start(retention_seconds=0)
        other = self.bury("i-1", "other")
        done = self.in_state(WorkState.COMPLETED, "i-1")
        assert self.queue.prune() == 1
        with refused(WorkItemNotFoundError, item_id="i-1", tenant="acme"):
            self.look(done)
        assert self.look(other) == other

    def test_a_pruned_items_worker_is_told_so(self) -> None:
        """SPEC 4: or that the item which has the id now isn't its own."""
        self.start(retention_seconds=0)
        held = self.take_new("i-1")
        self.say("complete", held)
        self.queue.prune()
        with refused(WorkItemNotFoundError, item_id="i-1"):
            self.say("complete", held)
        new = self.put("i-1")
        with refused(LeaseLostError, reason="expired"):
            self.say("complete", held)
        assert self.look(new) == new
