"""What must hold after every event, seen from outside: in the registry, the streams, the store and the engines.

- The ledger of every commit is exact and follows from the one before: no id leaves it twice, none comes back.
- No group is in two commits of one lineage, and the committed weights hold exactly the groups that the commits name.
- A GroupReady leaves its stream only once its group is closed: by a commit, or by the learner's own books.
- Each epoch has one writer; epochs grow; steps follow each other; `active <= head`, and what is active was confirmed
  by at least `min_replicas`.
- No group is issued beyond the window; no more adapters are wanted than there are slots.
- No replica is asked for an adapter that it never confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors.residency import wanted
from broker import names
from broker.errors import MalformedMessage
from broker.messages import GenerateRequest, GroupReady, Head, Node, VersionRecord, decode, decode_one_of
from learner.checkpoint import Checkpoint
from learner.credit import CreditRule
from learner.ledger import Ledger
from learner.service import Learner
from tests.chaos.simulation.models import History, history_of
from tests.chaos.simulation.objects import Objects
from tests.chaos.simulation.schedule import Shape
from tests.chaos.simulation.server import Server, Stored, Stream


@dataclass(frozen=True)
class Commit:
    """One commit, and the history that its weights must have."""

    step: int
    cursor: int
    open: frozenset[str]
    history: History
    trained: frozenset[str]


class Referee:
    """Watches one run. `violations` says what went wrong."""

    def __init__(
        self, run: str, shape: Shape, server: Server, objects: Objects, who: Callable[[], tuple[str, Learner | None]]
    ) -> None:
        self._run = run
        self._shape = shape
        self._server = server
        self._objects = objects
        self._who = who
        self._rule = CreditRule(shape.groups_per_step, shape.max_staleness, shape.publish_every)
        self.violations: list[str] = []
        self.on_violation: Callable[[], None] = lambda: None
        self.head: Head | None = None
        self._versions: dict[int, VersionRecord] = {}
        self._writers: dict[tuple[str, int], str] = {}
        self._commits: dict[str, Commit] = {"": Commit(0, 0, frozenset(), [], frozenset())}
        """By the checkpoint's key."""
        self._confirmed: dict[str, set[str]] = {}
        self.commits = 0
        self.broker_was_wiped = False

    def fail(self, what: str) -> None:
        self.violations.append(what)
        self.on_violation()

    # ------------------------------------------------------------------------------------------------ the registry

    def on_written(self, bucket: str, key: str, value: bytes | None, revision: int) -> None:
        if bucket == names.NODES_BUCKET and value is not None:
            node = decode(value, Node)
            if node.node == "replica":
                self._confirmed.setdefault(node.id, set()).update(node.confirmed)
                for adapter, reason in node.refused.items():
                    if reason.startswith("no slot"):
                        self.fail(f"replica {node.id} has no slot for {adapter}: {reason}")
        if bucket == names.RUNS_BUCKET and value is not None:
            if key == self._run:
                self._on_head(decode(value, Head))
            elif key.startswith(f"{self._run}.v."):
                record = decode(value, VersionRecord)
                self._versions[record.adapter.version] = record
            self._check_slots()

    def _check_slots(self) -> None:
        if self.head is not None:
            needed = wanted({self._run: self.head}, {self._run: self._versions}, self.head.fleet)
            if len(needed) > self._shape.max_staleness + 2:
                self.fail(f"{[ref.version for ref in needed]} are to be loaded at once: too many for the slots")

    def _on_head(self, new: Head) -> None:
        old, self.head = self.head, new
        writer, _ = self._who()
        if old is not None and new.incarnation != old.incarnation:
            if not self.broker_was_wiped or self.commits:
                self.fail(f"incarnation {new.incarnation} took the place of {old.incarnation}, which had commits")
            old = None  # nothing knew of it any more
        if self._writers.setdefault((new.incarnation, new.epoch), writer) != writer:
            self.fail(f"epoch {new.epoch} is not {writer}'s, who wrote in it")
        if new.active > new.head:
            self.fail(f"version {new.active} is active, the newest committed is {new.head}")
        named = {ref.version for ref in new.live}
        if new.active > 0 and new.active not in named:
            self.fail(f"version {new.active} is active and is not among the live ones {sorted(named)}")
        if new.active > (old.active if old else 0):
            name = next((ref.name for ref in new.live if ref.version == new.active), "")
            serving = [replica for replica, confirmed in self._confirmed.items() if name in confirmed]
            if len(serving) < self._shape.min_replicas:
                self.fail(f"version {new.active} is active, and only {serving} have ever confirmed it")
        if old is None:
            return
        if new.epoch < old.epoch:
            self.fail(f"epoch {new.epoch} was written after epoch {old.epoch}")
        if (
            new.epoch == old.epoch
            and new.active < old.active
            and not self._objects.forgotten
            and not self.broker_was_wiped
        ):
            self.fail(f"version {new.active} became active after {old.active}")
        before = old.checkpoint.key if old.checkpoint else ""
        after = new.checkpoint.key if new.checkpoint else ""
        if after == before:
            return
        if after in self._commits:
            if not self._objects.forgotten and not self.broker_was_wiped:
                self.fail(f"the head went back from step {old.step} to {new.step}, and the store has lost nothing")
            return
        self._on_commit(old, new, self._commits[before])

    def _on_commit(self, old: Head, new: Head, before: Commit) -> None:
        assert new.checkpoint is not None
        self.commits += 1
        if new.step != old.step + 1:
            self.fail(f"step {new.step} was committed after step {old.step}")
        state = self._objects.ever_held(new.checkpoint.key)
        if state is None:
            self.fail(f"step {new.step} was committed without its state in the store")
            return
        checkpoint = decode(state, Checkpoint)
        ledger = Ledger.from_state(checkpoint.ledger)
        open_ids = frozenset(ledger.open_ids())
        trained = frozenset(one.id for one in checkpoint.trained)
        if len(trained) != self._shape.groups_per_step or len(checkpoint.trained) != len(trained):
            self.fail(f"step {new.step} was made from {checkpoint.trained}")
        if twice := trained & before.trained:
            self.fail(f"step {new.step} trains {sorted(twice)} a second time")
        if back := [id for id in open_ids - before.open if _index(id) < before.cursor]:
            self.fail(f"step {new.step} opens {back} again")
        if strange := [id for id in trained if id not in before.open and _index(id) < before.cursor]:
            self.fail(f"step {new.step} trains {strange}, which were closed before")
        history = self._history_after(before, checkpoint)
        self._commits[new.checkpoint.key] = Commit(new.step, ledger.cursor, open_ids, history, before.trained | trained)

    def _history_after(self, before: Commit, checkpoint: Checkpoint) -> History:
        """The history that the committed weights have, which must be that of the commit before and this step."""
        histories = []
        for part in (checkpoint.weights, checkpoint.optimizer):
            assert part is not None
            found = self._objects.ever_held(part.key)
            if found is None:
                self.fail(f"step {checkpoint.step} was committed without {part.key} in the store")
                return before.history
            histories.append(history_of(found))
        weights, optimizer = histories
        if weights != optimizer:
            self.fail(f"step {checkpoint.step}: weights and optimizer have different histories")
        named = [one.id for one in checkpoint.trained]
        added = weights[len(before.history) :]
        if weights[: len(before.history)] != before.history or len(added) > 1:
            self.fail(f"step {checkpoint.step}: the weights do not follow from those of the commit before")
        elif added and [id for id in named if id in added[0]] != added[0]:
            self.fail(f"step {checkpoint.step}: the weights were made from {added[0]}, the commit names {named}")
        return weights

    # ------------------------------------------------------------------------------------------------- the messages

    def on_removed(self, stream: Stream, message: Stored) -> None:
        if stream.name != names.groups_stream(self._run):
            return
        try:
            ready = decode_one_of(message.data, GroupReady)
        except MalformedMessage:
            return
        who, learner = self._who()
        if learner is None or not isinstance(ready, GroupReady):
            return
        if ready.key in self._objects.forgotten:
            return  # its blob is gone, and its task is issued again
        if learner._ledger.is_open(ready.group):
            sequence = learner._intake._holding.get(ready.group)
            if sequence is None or sequence.sequence == message.sequence:
                self.fail(f"{who} acknowledged {ready.group}, which it has not closed")

    def on_published(self, subject: str, data: bytes) -> None:
        if not subject.startswith("replica.") or not subject.endswith(".generate"):
            return
        request = decode(data, GenerateRequest)
        replica = subject.split(".")[1]
        if request.adapter is not None and request.adapter not in self._confirmed.get(replica, set()):
            self.fail(f"replica {replica} was asked for {request.adapter}, which it never confirmed")

    def on_issue(self, learner: Learner) -> None:
        """The learner has opened a group."""
        if learner._ledger.open_groups > self._rule.window:
            self.fail(f"{learner._ledger.open_groups} groups are open, the window is {self._rule.window}")


def _index(group: str) -> int:
    return int(group.rsplit("-", 1)[-1])
