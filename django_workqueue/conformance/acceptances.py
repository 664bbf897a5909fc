"""An id or a key that was accepted more than once: which is meant, and who may come back."""

from __future__ import annotations

from dataclasses import replace

from django_workqueue.conformance._bench import HOLDER_VERBS, Bench, refused
from django_workqueue.exceptions import InvalidTransitionError, LeaseLostError, LiveTwinError
from django_workqueue.items import WorkItem, WorkState


class Superseded(Bench):
    """An id, or a key, that was accepted anew since."""

    def get(self, item: WorkItem) -> WorkItem:
        """Return this very acceptance."""
        return self.queue.get(item.id, tenant=item.tenant, job_id=item.job_id)

    def requeue(self, item: WorkItem) -> WorkItem:
        return self.operate("requeue", item, job_id=item.job_id)

    def test_an_older_acceptance_is_read_by_its_job_id(self) -> None:
        """SPEC 3, 4."""
        self.start()
        items = [self.bury("i-1"), self.say("complete", self.take_new("i-1")), self.put("i-1")]
        assert [self.get(item) for item in items] == items
        assert self.queue.get("i-1", tenant="acme") == items[-1]

    def test_a_verb_without_a_job_id_means_the_latest_acceptance(self) -> None:
        """SPEC 4."""
        self.start()
        older = self.bury("i-1")
        done = self.say("complete", self.take_new("i-1"))
        for verb in ("requeue", "discard", "cancel", "resume"):
            with refused(InvalidTransitionError, state="completed", verb=verb):
                self.operate(verb, done)
        newer = self.put("i-1")
        assert self.operate("cancel", older).job_id == newer.job_id
        assert (self.get(older), self.get(done)) == (older, done)

    def test_an_older_acceptance_takes_its_id_and_key_back(self) -> None:
        """SPEC 4: from one that has finished; that stays readable."""
        self.start()
        older = self.bury("i-1", dedupe_key="k", payload={"n": 1})
        done = self.say("complete", self.take_new("i-1", dedupe_key="k", payload={"n": 2}))
        back = self.requeue(older)
        assert (back.state, back.job_id, back.payload) == ("queued", older.job_id, {"n": 1})
        assert (back.attempts, back.failures, back.max_attempts) == (1, ("boom",), 2)
        assert self.queue.get("i-1", tenant="acme") == back
        assert self.put("i-1") == self.put("i-2", dedupe_key="k") == back
        assert self.get(done) == done
        self.expect(depth=1, due=1, completed=1)
        again = self.say("complete", self.take())
        assert self.queue.get("i-1", tenant="acme") == again == self.get(older)

    def test_only_the_key_is_taken_back_where_only_the_key_was_taken(self) -> None:
        """SPEC 4."""
        self.start()
        older = self.bury("i-1", dedupe_key="k")
        done = self.say("complete", self.take_new("i-2", dedupe_key="k"))
        back = self.operate("requeue", older)
        assert self.put("i-3", dedupe_key="k") == back
        assert self.queue.get("i-2", tenant="acme") == done
        assert self.put("i-2").state is WorkState.QUEUED

    def test_only_the_id_is_taken_back_where_only_the_id_was_taken(self) -> None:
        """SPEC 4: the other keeps its key."""
        self.start()
        older = self.bury("i-1")
        other = self.bury("i-1", dedupe_key="k")
        back = self.requeue(older)
        assert self.put("i-1") == back
        assert self.put("i-2", dedupe_key="k").id == "i-2"
        assert self.get(other) == other

    def test_the_fence_goes_on_from_every_acceptance_of_the_id(self) -> None:
        """SPEC 3: to and fro; no late worker of any of them is mistaken for the holder."""
        self.start()
        dead = [self.bury("i-1"), self.bury("i-1"), self.bury("i-1")]
        claims = [replace(item, worker="w1", fence=n) for n, item in enumerate(dead, start=1)]
        for fence, index in enumerate((0, 2, 1, 0), start=4):
            back = self.requeue(dead[index])
            for claim in claims:
                with refused(LeaseLostError, reason="expired", holder=None):
                    self.say("fail", claim, retryable=False)
            held = self.take()
            assert (held.job_id, held.fence) == (back.job_id, fence)
            for claim in claims:
                for verb in HOLDER_VERBS:
                    with refused(LeaseLostError, reason="taken", holder="w1"):
                        self.say(verb, claim)
            dead[index] = self.say("fail", held)
            claims.append(held)
        self.put("i-1")
        assert self.take().fence == 8

    def test_a_repetition_means_the_acceptance_that_has_the_id(self) -> None:
        """SPEC 1.3, 4: the completion of another one is none."""
        self.start()
        older = self.bury("i-1")
        held = self.take_new("i-1")
        self.say("complete", held)
        back = self.requeue(older)
        with refused(LeaseLostError, reason="expired"):
            self.say("complete", held)
        assert self.look(older) == back

    def test_a_discarded_or_cancelled_older_acceptance_is_meant_by_its_job_id(self) -> None:
        """SPEC 4."""
        self.start()
        older = self.bury("i-1")
        newer = self.put("i-1")
        discarded = self.operate("discard", older, job_id=older.job_id)
        assert (discarded.state, discarded.job_id) == (WorkState.CANCELLED, older.job_id)
        assert self.look(older) == newer
        with refused(InvalidTransitionError, state="cancelled", verb="cancel"):
            self.operate("cancel", older, job_id=older.job_id)
        cancelled = self.operate("cancel", newer, job_id=newer.job_id)
        assert cancelled.job_id == newer.job_id
        self.expect(cancelled=2)


class Twins(Bench):
    """Of two items with one id, or one key, only one is live."""

    def refuse_twin(self, dead: WorkItem, twin: WorkItem) -> None:
        """Expect that *dead* can't be requeued, and that nothing changes, because of *twin*."""
        facts = {"item_id": dead.id, "state": dead.state.value, "verb": "requeue"}
        with refused(LiveTwinError, twin=self.look(twin), retryable=False, **facts):
            self.operate("requeue", dead, job_id=dead.job_id, payload={"n": 2})
        assert self.queue.get(dead.id, tenant="acme", job_id=dead.job_id) == dead

    def test_a_live_item_with_the_id_is_a_twin(self) -> None:
        """SPEC 4: in whatever state."""
        self.start()
        for state in (WorkState.QUEUED, WorkState.CLAIMED, WorkState.PAUSED):
            name = state.value
            dead = self.bury(name, queue=name)
            self.refuse_twin(dead, self.in_state(state, name, queue=name))
            cancelled = self.operate("discard", dead, job_id=dead.job_id)
            self.refuse_twin(cancelled, self.look(dead))

    def test_a_live_item_with_the_key_is_a_twin(self) -> None:
        """SPEC 4, R39: of whatever queue."""
        self.start()
        for state in (WorkState.QUEUED, WorkState.CLAIMED, WorkState.PAUSED):
            name = state.value
            dead = self.bury(dedupe_key=name)
            self.refuse_twin(dead, self.in_state(state, queue=name, dedupe_key=name))
        assert len(self.queue.dead_letters(tenant="acme")) == 3

    def test_a_requeued_acceptance_is_a_twin_of_the_others(self) -> None:
        """SPEC 4."""
        self.start()
        dead = [self.bury("i-1", dedupe_key="k"), self.bury("i-1"), self.bury(dedupe_key="k")]
        back = self.operate("requeue", dead[0], job_id=dead[0].job_id)
        self.refuse_twin(dead[1], back)
        self.refuse_twin(dead[2], back)
        self.say("complete", self.take())
        assert self.operate("requeue", dead[1], job_id=dead[1].job_id).state is WorkState.QUEUED

    def test_an_item_of_another_tenant_is_no_twin(self) -> None:
        """R43."""
        self.start()
        dead = self.bury("i-1", dedupe_key="k")
        self.put("i-1", "other", dedupe_key="k")
        assert self.operate("requeue", dead).state is WorkState.QUEUED
