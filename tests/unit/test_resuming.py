"""Claiming, committing, losing, resuming: with a store and a registry in memory, and no policy but its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from actors.residency import wanted
from broker.errors import BrokerLost, ConfigError, Fenced, RunConflict, StoreError
from broker.messages import BlobRef, Head, Node, VersionRecord
from broker.registry import Registry
from broker.runspec import RunSpec
from deploy.config import check
from learner.branch import Branch, Origin, fetch_branch
from learner.checkpoint import Checkpoint
from learner.claim import claim
from learner.history import History, ancestry, history_of, prefix_of
from learner.ledger import Ledger
from learner.recovery import Intact
from learner.session import Session
from learner.sweep import removable_copies
from tests.memory import MemoryBucket, MemoryStore, memory_registry
from tests.unit.test_learner_parts import head as head_record


def spec_of(name: str = "r", **sections: dict[str, Any]) -> RunSpec:
    plain: dict[str, dict[str, Any]] = {
        "run": {"name": name, "model": "m"},
        "tasks": {"source": "t.jsonl"},
        "environment": {"rewards": ["r.py:f"]},
        "algorithm": {"max_staleness": 1},
    }
    return check({**plain, **{key: {**plain.get(key, {}), **value} for key, value in sections.items()}}, "x")


class World:
    """One broker and one store, and learners that come and go."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.registry: Registry
        self.runs: MemoryBucket
        self.registry, self.runs = memory_registry()
        self.present: list[Node] = []
        self.learners = 0

    async def start(self, spec: RunSpec | None = None, **options: Any) -> Session:
        """A learner that claims its run, leaves its mark and finds its newest intact commit."""
        self.learners += 1
        fields: dict[str, Any] = {"node": f"learner-{self.learners}", "fingerprint": "m1", "code": {}}
        fields |= {"restart": False, "take_over": False, "nodes": lambda: self.present, "presence": 0.0}
        claimed = await claim(self.registry, self.store, spec or spec_of(), **{**fields, **options})  # type: ignore[arg-type]
        session = Session(self.registry, self.store, claimed)  # type: ignore[arg-type]
        await session.remember_claim()
        return session

    async def resume(self, spec: RunSpec | None = None, **options: Any) -> tuple[Session, Intact | None]:
        session = await self.start(spec, **options)
        intact = await session.newest_intact()
        if intact is not None:
            await session.resume_from(intact)
        return session, intact

    async def head(self, run: str = "r") -> Head:
        found = await self.registry.head(run)
        assert found is not None
        return found[0]

    async def versions(self, run: str = "r") -> dict[int, VersionRecord]:
        return {record.adapter.version: record for record in await self.registry.versions(run)}

    def lose(self, words: str) -> int:
        """Remove the objects whose key holds `words`; tells how many."""
        keys = [key for key in self.store.objects if words in key]
        for key in keys:
            del self.store.objects[key]
        return len(keys)


async def step(session: Session, *, flavour: str = "", publish: bool = True, until: str = "end") -> None:
    """One step: offer, store, commit, activate; cut short after `until`."""
    number = session.head.step + 1
    version = session.head.head + publish
    weights_data = f"weights {number} {flavour}".encode()
    adapter = await session.offer(version, number, weights_data, {}) if publish else None
    weights = adapter.blob if adapter else await session.store_blob(number, "weights", weights_data)
    optimizer = await session.store_blob(number, "optimizer", f"optimizer {number} {flavour}".encode())
    checkpoint = Checkpoint(
        run=session.run, incarnation=session.head.incarnation, step=number, version=version, weights=weights,
        optimizer=optimizer, ledger=Ledger().to_state(), rewards=[0.5] * number, trained=[], seconds=1.0,
    )  # fmt: skip
    ref = await session.store_blob(number, "state", checkpoint.encode())
    if until == "upload":
        return
    await session.commit(checkpoint, ref, adapter, reward=0.5, summary={"reward": 0.5}, trace={})
    if publish:
        await session.activate(version)


async def trained(world: World, steps: int) -> Session:
    session = await world.start()
    for _ in range(steps):
        await step(session)
    return session


# ------------------------------------------------------------------------------------------------------- broker wiped


async def test_a_run_whose_broker_was_wiped_goes_on_from_its_newest_commit() -> None:
    world = World()
    before = (await trained(world, 5)).head
    world.runs.wipe()
    session, intact = await world.resume()
    after = await world.head()
    assert intact is not None
    assert intact.weights == b"weights 5 "
    assert after.incarnation == before.incarnation
    assert (after.step, after.head, after.active) == (5, 5, 4), "active as of the commit; its learner drives it to head"
    assert after.epoch > before.epoch
    assert after.adapter == before.adapter
    assert [ref.version for ref in after.live] == [4, 5]
    assert "the broker had lost this run" in session.notice
    assert "step 5, version 5" in session.notice


async def test_version_records_are_made_again_after_the_broker_was_wiped() -> None:
    world = World()
    await trained(world, 4)
    before = await world.versions()
    world.runs.wipe()
    await world.resume()
    after = await world.versions()
    assert after.keys() == {1, 2, 3, 4}
    for version, record in after.items():
        old = before[version]
        assert (record.adapter, record.step, record.checkpoint, record.reward, record.state) == (
            old.adapter, old.step, old.checkpoint, old.reward, "committed",
        )  # fmt: skip


async def test_a_run_whose_broker_was_wiped_before_its_first_commit_keeps_its_incarnation() -> None:
    world = World()
    first = await world.start()
    world.runs.wipe()
    session, intact = await world.resume()
    assert intact is None
    assert session.head.incarnation == first.head.incarnation
    assert session.head.epoch > first.head.epoch + 1, "a claim that the store never heard of is left out"
    assert "the broker had lost this run" in session.notice


async def test_a_run_goes_on_with_its_temperature_or_not_at_all() -> None:
    world = World()
    await world.start(spec_of(sampling={"temperature": 1.0}))
    with pytest.raises(RunConflict, match=r"sampling.temperature = 1.0, .* now says 0.7: restore it"):
        await world.start(spec_of(sampling={"temperature": 0.7}))


async def test_a_run_that_goes_on_may_move_to_another_fleet() -> None:
    world = World()
    await world.start(spec_of(fleet={"name": "old"}))
    session = await world.start(spec_of(fleet={"name": "new"}))
    assert session.head.fleet == "new"


async def test_epochs_go_on_rising_over_wipes_and_restarts() -> None:
    world = World()
    epochs = []
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({}, False),
        ({"restart": True}, True),
        ({"restart": True}, True),
        ({}, True),
    ]
    for options, wipe in cases:
        session = await world.start(**options)
        epochs.append(session.head.epoch)
        if wipe:
            world.runs.wipe()
    assert epochs == sorted(set(epochs))


async def test_the_incarnation_of_the_highest_epoch_comes_back_however_little_it_did() -> None:
    world = World()
    await trained(world, 3)
    restarted = await world.start(restart=True)
    world.runs.wipe()
    session, intact = await world.resume()
    assert session.head.incarnation == restarted.head.incarnation
    assert intact is None, "it had made no step; the one before it stays where it was left"


async def test_a_wiped_broker_and_restart_begin_anew_under_a_newer_epoch() -> None:
    world = World()
    before = (await trained(world, 3)).head
    world.runs.wipe()
    session = await world.start(restart=True)
    assert session.head.incarnation != before.incarnation
    assert session.head.epoch > before.epoch
    assert session.head.step == 0
    assert session.notice == ""


async def test_a_deleted_run_does_not_come_back_even_by_what_a_cut_off_learner_writes_later() -> None:
    world = World()
    zombie = await trained(world, 3)
    mark = zombie.head
    await world.store.put(prefix_of("deleted", mark), mark.encode())
    world.runs.wipe()
    with pytest.raises(Fenced, match="was deleted"):
        await step(zombie)
    assert world.lose("/commit-") == 4, "the zombie's copy too"
    world.lose("/claim-")
    await world.store.put(prefix_of("commit", zombie.head), zombie.head.encode())
    session, intact = await world.resume()
    assert intact is None
    assert session.head.incarnation != zombie.head.incarnation
    assert session.head.epoch > mark.epoch


async def test_a_deletion_that_was_cut_short_is_not_gone_on_with() -> None:
    world = World()
    old = (await trained(world, 2)).head
    await world.store.put(prefix_of("deleted", old), old.encode())
    session = await world.start()
    assert session.head.incarnation != old.incarnation
    assert session.head.step == 0


@pytest.mark.parametrize("another_epoch", [False, True])
async def test_a_broker_that_fell_behind_the_store_is_brought_up_to_it(another_epoch: bool) -> None:
    world = World()
    session = await trained(world, 2)
    backup, sequence = dict(world.runs.entries), world.runs.sequence
    if another_epoch:
        session = await world.start()
    for _ in range(2):
        await step(session)
    world.runs.entries, world.runs.sequence = backup, sequence
    session, intact = await world.resume()
    assert intact is not None
    assert session.head.step == 4
    assert {version: record.state for version, record in (await world.versions()).items()} == dict.fromkeys(
        range(1, 5), "committed"
    )


async def test_a_step_that_a_later_learner_repeated_is_taken_from_the_later_one() -> None:
    world = World()
    first = await trained(world, 3)
    await step(first, flavour="of the dead learner", until="upload")
    await first._remember("commit", msgspec.structs.replace(first.head, step=4, head=4))
    second, _ = await world.resume()
    await step(second, flavour="of its successor")
    world.runs.wipe()
    _, intact = await world.resume()
    assert intact is not None
    assert intact.weights == b"weights 4 of its successor"
    records = await world.versions()
    assert records[4].adapter.name == (await world.head()).adapter.name  # type: ignore[union-attr]


async def test_the_copy_of_a_commit_lies_in_the_store_before_the_commit_counts() -> None:
    world = World()
    session = await trained(world, 1)

    async def dies(*_: Any, **__: Any) -> None:
        raise ConnectionError("killed")

    session.write = dies  # type: ignore[method-assign,assignment]
    with pytest.raises(ConnectionError):
        await step(session)
    assert (await world.head()).step == 1
    assert [copy.step for copy in (await history_of(world.store, "r")).copies] == [2, 1, 0]  # type: ignore[arg-type]
    _, intact = await world.resume()
    assert intact is not None
    assert intact.checkpoint.step == 1, "the broker's word goes before the store's"


async def test_a_store_that_is_full_keeps_no_run_from_beginning_and_gets_the_claim_with_the_first_commit() -> None:
    world = World()
    real = world.store.put

    async def full(prefix: str, data: bytes) -> BlobRef:
        raise StoreError("no room")

    world.store.put = full  # type: ignore[method-assign]
    session = await world.start()
    world.store.put = real  # type: ignore[method-assign]
    assert world.store.objects == {}
    await step(session)
    await step(session)
    copies = (await history_of(world.store, "r")).copies  # type: ignore[arg-type]
    assert [(copy.kind, copy.step) for copy in copies] == [("commit", 2), ("commit", 1), ("claim", 0)]


async def test_copies_that_are_corrupt_are_passed_over_and_none_left_is_refused_with_the_remedy() -> None:
    world = World()
    await trained(world, 2)
    world.runs.wipe()
    newest = next(key for key in world.store.objects if "/commit-" in key and "-00000002-" in key)
    world.store.objects[newest] = b"garbage"
    session, _ = await world.resume()
    assert session.head.step == 1
    world.runs.wipe()
    for key in world.store.objects:
        if "/history/" in key:
            world.store.objects[key] = b"garbage"
    with pytest.raises(StoreError, match=r"no record of it, and none of the \d+ copies .* --restart"):
        await world.start()


async def test_a_learner_that_outlived_the_broker_s_loss_is_still_in_the_way() -> None:
    world = World()
    session = await trained(world, 1)
    world.runs.wipe()
    alive = Node(id=session.head.learner, node="learner", fleet="m", host="elsewhere", pid=1, state="ready", run="r")
    calls = 0

    def present() -> Sequence[Node]:
        """Nobody at first: presence was lost too."""
        nonlocal calls
        calls += 1
        return [alive] if calls > 1 else []

    with pytest.raises(RunConflict, match="is held by the learner learner-1 on elsewhere"):
        await world.start(nodes=present)
    assert (await world.start(nodes=present, take_over=True)).head.step == 1


async def test_a_learner_whose_broker_lost_the_run_says_that_and_not_that_it_was_deleted() -> None:
    world = World()
    session = await trained(world, 1)
    world.runs.wipe()
    with pytest.raises(BrokerLost, match="Start the learner again: it goes on from the last commit"):
        await session.fenced()
    with pytest.raises(BrokerLost):
        await step(session)
    assert BrokerLost.exit_code == 9


@pytest.mark.parametrize("existing", [False, True])
async def test_of_two_learners_that_claim_at_once_one_is_refused(existing: bool) -> None:
    world = World()
    if existing:
        await trained(world, 1)
    real = world.registry.set_head
    raced = False

    async def set_head(head: Head, revision: int, **options: Any) -> int:
        nonlocal raced
        if not raced:
            raced = True
            await world.start()  # the other one is quicker
        return await real(head, revision, **options)

    world.registry.set_head = set_head  # type: ignore[method-assign]
    with pytest.raises(RunConflict, match="claimed run r at the same moment"):
        await world.start()
    winner = await world.head()
    history = await history_of(world.store, "r")  # type: ignore[arg-type]
    assert {copy.incarnation for copy in history.copies} == {winner.incarnation}, "the loser leaves nothing behind"
    assert history.epoch == winner.epoch


async def test_who_claims_the_same_epoch_under_another_name_is_noticed() -> None:
    world = World()
    session = await trained(world, 1)
    head = await world.head()
    await world.registry.set_head(msgspec.structs.replace(head, learner="other"), world.runs.entries["r"].revision)
    assert "held by other" in (await session.fenced() or "")


# -------------------------------------------------------------------------------------------------------- store losses


async def test_after_the_newest_commit_is_lost_the_run_goes_back_and_its_versions_say_so() -> None:
    world = World()
    await trained(world, 5)
    assert world.lose("/checkpoints/000005/") == 2
    assert world.lose("/adapters/000004.") == 1
    session, intact = await world.resume()
    head = await world.head()
    assert intact is not None
    assert (intact.checkpoint.step, len(intact.lost)) == (3, 2)
    assert (head.step, head.head, head.active) == (3, 3, 3)
    assert [ref.version for ref in head.live] == [2, 3]
    assert "the newest 2 step(s) are lost from the store" in session.notice
    assert "goes on from step 3, version 3" in session.notice
    records = await world.versions()
    assert {version: record.state for version, record in records.items()} == {
        1: "committed", 2: "committed", 3: "committed", 4: "failed", 5: "failed",
    }  # fmt: skip
    assert "went back to version 3" in records[5].detail
    assert records[5].checkpoint is None
    await step(session, flavour="anew")
    assert session.notice == ""
    again = await world.versions()
    assert again[4].state == "committed"
    assert again[4].adapter.name != records[4].adapter.name, "other bytes, another name"
    assert again[5].state == "failed"
    loaded = wanted({"r": await world.head()}, {"r": again}, "m")
    assert records[5].adapter.name not in {ref.name for ref in loaded}


async def test_between_publications_every_commit_can_be_gone_back_to() -> None:
    world = World()
    session = await world.start(spec_of(algorithm={"max_staleness": 1, "publish_every": 2}))
    for number in range(1, 6):
        await step(session, publish=number % 2 == 0)
    world.lose("/checkpoints/000005/state")
    world.lose("/checkpoints/000004/state")
    session, intact = await world.resume()
    assert intact is not None
    assert (session.head.step, session.head.head) == (3, 1)
    assert intact.weights == b"weights 3 "
    assert session.head.adapter is not None
    assert world.store.objects[session.head.adapter.key] == b"weights 2 ", "version 1 is what step 2 published"
    assert (await world.versions())[1].step == 2


async def test_a_step_that_was_never_committed_is_nothing_to_go_back_to() -> None:
    world = World()
    session = await trained(world, 3)

    async def dies(**_: Any) -> Head:
        raise ConnectionError("killed")

    session.write = dies  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await step(session)
    world.lose("/checkpoints/000003/")
    _, intact = await world.resume()
    assert intact is not None
    assert intact.checkpoint.step == 2


async def test_a_head_whose_adapter_is_lost_is_not_intact_although_its_state_is() -> None:
    world = World()
    session = await trained(world, 2)
    await step(session, publish=False)
    world.lose("/adapters/000002.")
    session, intact = await world.resume()
    assert intact is not None
    assert (session.head.step, session.head.head) == (1, 1)


async def test_an_active_version_that_is_lost_gives_way_to_the_newest() -> None:
    world = World()
    session = await trained(world, 3)
    real = session.activate

    async def never(version: int) -> None:
        return None

    session.activate = never  # type: ignore[method-assign]
    await step(session)
    session.activate = real  # type: ignore[method-assign]
    assert (session.head.head, session.head.active) == (4, 3)
    world.lose("/adapters/000003.")
    session, _ = await world.resume()
    assert (session.head.head, session.head.active) == (4, 4)
    assert 3 not in {ref.version for ref in session.head.live}


async def test_a_store_that_lost_everything_is_refused_with_the_remedy() -> None:
    world = World()
    await trained(world, 3)
    world.store.objects.clear()
    with pytest.raises(
        StoreError, match=r"none of its 3 commits is intact .*Restore the store, or begin anew"
    ) as error:
        await world.resume()
    assert error.value.exit_code == 8
    world.lose("/history/")
    assert (await world.start(restart=True)).head.step == 0


async def test_broker_and_store_both_in_part_lost_meet_at_the_newest_intact_commit() -> None:
    world = World()
    await trained(world, 4)
    world.runs.wipe()
    world.lose("/checkpoints/000004/optimizer")
    session, intact = await world.resume()
    assert intact is not None
    assert session.head.step == 3
    assert "the broker had lost this run" in session.notice
    assert "newest 1 step(s) are lost" in session.notice
    assert (await world.versions()).keys() == {1, 2, 3}


# ---------------------------------------------------------------------------------------------------- version records


async def test_a_version_whose_learner_died_before_its_record_is_mended_at_resume() -> None:
    world = World()
    session = await trained(world, 2)

    async def dies(record: VersionRecord) -> None:
        if record.state == "committed":
            raise ConnectionError("killed")
        await world.registry.put_version(record)

    session._put_version = dies  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await step(session)
    before = (await world.versions())[3]
    assert (before.state, before.checkpoint) == ("offered", None)
    await world.resume()
    after = (await world.versions())[3]
    assert (after.state, after.step, after.reward) == ("committed", 3, 0.5)
    assert after.checkpoint == (await world.head()).checkpoint
    writes = world.runs.sequence
    await world.resume()
    assert world.runs.sequence == writes + 1, "where nothing is amiss nothing but the claim is written"


# ------------------------------------------------------------------------------------------------------------ branches


async def branch(world: World, text: str, spec: RunSpec | None = None, **options: Any) -> Branch:
    fields: dict[str, Any] = {"fingerprint": "m1", "fresh_optimizer": False, **options}
    origin = Origin.parse(text)
    return await fetch_branch(world.registry, world.store, origin, spec or spec_of("new"), **fields)  # type: ignore[arg-type]


async def test_a_branched_run_begins_with_the_named_version_under_its_own_keys() -> None:
    world = World()
    await trained(world, 4)
    chosen = await branch(world, "r@2")
    session = await world.start(spec_of("new"), branch=chosen)
    head = session.head
    assert (head.step, head.head, head.active, head.first, head.origin) == (0, 1, 0, 1, "r@2")
    assert head.adapter is not None
    assert head.adapter.key.startswith(f"runs/new/{head.incarnation}/adapters/000001.")
    assert head.adapter.name.startswith("new-v000001-")
    assert [ref.version for ref in head.live] == [1], "replicas load it before anything is issued"
    world.lose("runs/r/")
    intact = await session.newest_intact()
    assert intact is not None
    assert (intact.weights, intact.optimizer) == (b"weights 2 ", b"optimizer 2 ")
    assert intact.checkpoint.rewards == []
    await session.resume_from(intact)
    assert {v: r.state for v, r in (await world.versions("new")).items()} == {1: "committed"}
    await session.activate(1)
    await step(session)
    assert (session.head.step, session.head.head) == (1, 2)


async def test_a_branch_takes_the_optimizer_over_unless_a_fresh_one_is_asked_for() -> None:
    world = World()
    await trained(world, 2)
    for text in ("r", "r@latest"):
        chosen = await branch(world, text)
        assert (chosen.origin, chosen.weights, chosen.optimizer) == ("r@2", b"weights 2 ", b"optimizer 2 ")
    fresh = await branch(world, "r@1", fresh_optimizer=True)
    assert fresh.optimizer is None
    session = await world.start(spec_of("new"), branch=fresh)
    intact = await session.newest_intact()
    assert intact is not None
    assert (intact.weights, intact.optimizer) == (b"weights 1 ", None)


async def test_a_branched_run_survives_the_loss_of_the_broker_before_and_after_its_first_commit() -> None:
    world = World()
    await trained(world, 2)
    session = await world.start(spec_of("new"), branch=await branch(world, "r"))
    world.runs.wipe()
    session, intact = await world.resume(spec_of("new"))
    assert intact is not None
    assert (session.head.head, session.head.active, session.head.first) == (1, 0, 1)
    assert intact.weights == b"weights 2 "
    await session.activate(1)
    await step(session)
    world.runs.wipe()
    world.lose("runs/new/" + session.head.incarnation + "/checkpoints/000001/")
    session, intact = await world.resume(spec_of("new"))
    assert intact is not None
    assert (session.head.step, session.head.head) == (0, 1)
    assert (await world.versions("new")).keys() == {1}


async def test_a_run_that_the_broker_lost_can_still_be_branched_from() -> None:
    world = World()
    await trained(world, 3)
    world.runs.wipe()
    assert (await branch(world, "r@2")).weights == b"weights 2 "


@pytest.mark.parametrize(
    ("text", "spec", "said"),
    [
        ("r", spec_of("r"), "cannot be branched from itself"),
        ("nobody", spec_of("new"), "there is no run nobody to branch from; runs there are: r"),
        ("r@7", spec_of("new"), "run r has no version 7 to branch from; versions there are: 1, 3 to 4"),
        ("r@2", spec_of("new"), "no version 2 to branch from; versions there are: 1, 3 to 4"),
        ("r@0", spec_of("new"), "version 0 is the base model: leave out --from"),
        ("r@1", spec_of("new", lora={"rank": 4}), r"run r was created with lora.rank = 8, .* now says 4"),
        ("r@1", spec_of("new", lora={"alpha": 4}), r"run r was created with lora.alpha = 16, .* now says 4"),
    ],
)
async def test_what_cannot_be_branched_is_refused_by_name(text: str, spec: RunSpec, said: str) -> None:
    world = World()
    await trained(world, 4)
    assert world.lose("/adapters/000002.") == 1, "swept by retention"
    with pytest.raises(RunConflict, match=said):
        await branch(world, text, spec)


async def test_another_base_model_and_a_run_that_exists_are_refused() -> None:
    world = World()
    await trained(world, 1)
    with pytest.raises(RunConflict, match="base model m1, this machine's copy is m2"):
        await branch(world, "r", fingerprint="m2")
    chosen = await branch(world, "r")
    await world.start(spec_of("new"), branch=chosen)
    with pytest.raises(RunConflict, match=r"run new exists already .* leave out --from"):
        await world.start(spec_of("new"), branch=chosen)
    again = await world.start(spec_of("new"), branch=chosen, restart=True)
    assert (again.head.head, again.head.step) == (1, 0)


async def test_a_version_that_was_offered_and_never_committed_is_none_to_branch_from() -> None:
    world = World()
    session = await trained(world, 1)
    await step(session, until="upload")
    with pytest.raises(RunConflict, match="no version 2 to branch from; versions there are: 1"):
        await branch(world, "r@2")


@pytest.mark.parametrize("text", ["", "@3", "r@newest", "r@-1", "r@1@2"])
def test_an_origin_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected RUN, RUN@latest or RUN@VERSION"):
        Origin.parse(text)


# ------------------------------------------------------------------------------------------------------------- history


def test_keys_tell_the_history_without_being_read() -> None:
    def key(kind: str, epoch: int, step: int, incarnation: str) -> str:
        record = head_record(epoch=epoch, step=step, incarnation=incarnation)
        return f"{prefix_of(kind, record)}.{'0' * 64}"  # type: ignore[arg-type]

    keys = [
        key("claim", 1, 0, "old"), key("commit", 1, 9, "old"),
        key("claim", 2, 0, "new"), *(key("commit", 2, step, "new") for step in range(1, 6)),
        key("claim", 3, 5, "new"), key("commit", 3, 4, "new"),
        "runs/r/history/what.ever", "runs/r/history/commit-x-y-z.0",
    ]  # fmt: skip
    history = History(reversed(keys))
    assert (history.epoch, history.incarnation, history.deleted) == (3, "new", 0)
    assert [(copy.kind, copy.epoch, copy.step) for copy in history.copies[:3]] == [
        ("commit", 3, 4), ("claim", 3, 5), ("commit", 2, 5),
    ]  # fmt: skip
    led = ancestry(history.states("new"), 3, 4)
    assert [(copy.epoch, copy.step) for copy in led] == [(3, 4), (2, 3), (2, 2), (2, 1), (2, 0)]
    gone = History([*keys, key("deleted", 3, 4, "new")])
    assert (gone.copies, gone.epoch, gone.incarnation) == ([], 3, "")


def test_retention_removes_the_copies_of_the_commits_whose_state_it_removes_and_no_claim() -> None:
    day = 86400.0
    heads = [head_record(epoch=1, step=step, incarnation="i") for step in range(1, 6)]
    objects = [(f"{prefix_of('commit', head)}.{'0' * 64}", 0.0) for head in heads]
    objects += [(f"{prefix_of('claim', heads[0])}.{'0' * 64}", 0.0), (f"{prefix_of('commit', heads[4])}.x", 5 * day)]
    doomed = removable_copies(objects, incarnation="i", newest=5, keep=2, now=5 * day, grace_hours=24)
    assert doomed == [key for key, _ in objects[:3]]
    assert removable_copies(objects, incarnation="i", newest=5, keep=0, now=5 * day, grace_hours=24) == []
    assert removable_copies(objects, incarnation="other", newest=5, keep=2, now=5 * day, grace_hours=24) == []
