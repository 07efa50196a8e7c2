"""The learner's smaller pure parts: buffer, batch, residency, slots, leases, retention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.residency import offered, still_counts, wanted
from broker.errors import ConfigError
from broker.messages import AdapterRef, GroupReady, Head, Node, VersionRecord
from broker.runspec import RunSpec
from broker.trajectories import Episode, Group, Row
from deploy.config import check
from learner.admission import check_ranks, check_slots
from learner.batch import figures_of, outcomes_of, rewards_of, sequences_of, teaches
from learner.buffer import Buffer, Held
from learner.credit import CreditRule
from learner.janitor import Leases
from learner.priority import PRIORITIES
from learner.readings import StepLog
from learner.sweep import contested, losers, place_of, removable_groups, removable_versions


class Delivery:
    async def ack(self, timeout: float = 5.0) -> bool:
        return True


def episode(index: int, reward: float, version: int = 0) -> Episode:
    row = Row.of([1, 2, 3, 4], [0, 0, -1, -2], [0, 0, 1, 1], [-1, -1, version, version])
    return Episode(
        index=index, rows=[row], reward=reward, parts={}, turns=[], truncated=index == 0, replicas=["r"]
    )  # fmt: skip


def held(index: int, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Held:
    ready = GroupReady(
        run="r", incarnation="i", group=f"g{index}", index=index, version=version, adapter=None, key="k", size=1,
        sha256="0" * 64, rewards=list(rewards), lengths=[2] * len(rewards), seconds={}, actor="a",
    )  # fmt: skip
    episodes = [episode(number, reward, version) for number, reward in enumerate(rewards)]
    group = Group(
        run="r", incarnation="i", group=f"g{index}", index=index, version=version, adapter=None, episodes=episodes
    )
    return Held(ready, group, Delivery(), {})


def with_algorithm(**algorithm: Any) -> RunSpec:
    plain = {
        "run": {"name": "r", "model": "m"},
        "tasks": {"source": "t.jsonl"},
        "environment": {"rewards": ["r.py:f"]},
        "sampling": {"max_new_tokens": 4},
        "algorithm": algorithm,
    }
    return check(plain, "x")


def test_the_oldest_version_is_trained_first_then_the_earliest_task() -> None:
    buffer = Buffer()
    for index, version in ((5, 2), (1, 3), (4, 2), (2, 3)):
        buffer.add(held(index, version))
    assert buffer.take(5) is None
    assert len(buffer) == 4
    assert [item.id for item in buffer.take(3) or []] == ["g4", "g5", "g1"]
    assert "g2" in buffer


def test_another_priority_takes_the_groups_whose_rewards_differ_most() -> None:
    buffer = Buffer(PRIORITIES["reward_variance"])
    for index, rewards in ((1, (0.0, 0.5)), (2, (0.0, 1.0)), (3, (1.0, 1.0)), (4, (0.0, 1.0))):
        buffer.add(held(index, version=9 - index, rewards=rewards))
    assert [item.id for item in buffer.take(3) or []] == ["g4", "g2", "g1"]


def test_the_staleness_of_what_waits_is_its_mean_distance_from_the_head() -> None:
    buffer = Buffer()
    assert buffer.mean_staleness(7) == 0
    for index, version in ((1, 5), (2, 6), (3, 7)):
        buffer.add(held(index, version))
    assert buffer.mean_staleness(7) == pytest.approx(1)


def test_groups_without_signal_make_room_for_others_within_a_bound() -> None:
    buffer, spec = Buffer(), with_algorithm()
    for index in range(6):
        buffer.add(held(index, rewards=(0.0, 1.0) if index in (1, 4) else (1.0, 1.0)))
    assert [item.id for item in buffer.take_flat(lambda group: teaches(group, spec), 3)] == ["g0", "g2", "g3"]
    assert [item.id for item in buffer.take(3) or []] == ["g1", "g4", "g5"]
    assert buffer.take_flat(lambda group: teaches(group, spec), 0) == []


def test_what_is_too_stale_for_the_next_step_leaves_the_buffer() -> None:
    buffer = Buffer()
    for index, version in ((1, 1), (2, 2), (3, 3)):
        buffer.add(held(index, version))
    rule = CreditRule(groups_per_step=1, max_staleness=1, publish_every=1)
    assert [item.id for item in buffer.take_stale(rule, head=3)] == ["g1"]
    assert len(buffer) == 2


def test_groups_without_signal_are_skipped_and_the_others_trained() -> None:
    batch = [held(1), held(2, rewards=(1.0, 1.0))]
    spec = with_algorithm(advantage="dr_grpo")
    assert outcomes_of(batch, spec) == [("g1", "trained"), ("g2", "skipped")]
    sequences = sequences_of([item.group for item in batch], spec, head=0)
    assert [sequence.advantage for sequence in sequences] == [-0.5, 0.5]
    assert all(sequence.group == "g1" for sequence in sequences)


def test_each_token_keeps_its_staleness_and_its_episode() -> None:
    first, second = sequences_of([held(3, version=2).group], with_algorithm(), head=5)
    assert first.staleness is not None
    assert first.staleness.tolist() == [0, 0, 3, 3]
    assert (first.episode, second.episode) == ("g3/0", "g3/1")


def test_distillation_learns_from_groups_without_signal_too() -> None:
    batch = [held(2, rewards=(1.0, 1.0))]
    spec = with_algorithm(objective="distillation", teacher="owner/teacher")
    assert outcomes_of(batch, spec) == [("g2", "trained")]
    assert len(sequences_of([item.group for item in batch], spec, head=0)) == 2


def test_the_supervised_objective_imitates_the_better_episodes() -> None:
    batch = [held(1, rewards=(0.0, 1.0, 1.0, 0.25)).group]
    sequences = sequences_of(batch, with_algorithm(objective="cross_entropy"), head=0)
    assert [sequence.episode for sequence in sequences] == ["g1/1", "g1/2"]


def test_overlong_replies_lose_reward_before_advantages_are_taken() -> None:
    """All episodes sample 2 tokens of 4 possible, one more than the last buffer allows."""
    spec = with_algorithm(overlong_buffer=3, overlong_penalty=0.6)
    assert rewards_of(held(1).group, spec) == pytest.approx([-0.2, 0.8])
    assert figures_of([held(1)], head=0).reward == pytest.approx(0.5)


def test_a_steps_figures_count_every_group() -> None:
    figures = figures_of([held(1, version=2), held(2, version=3, rewards=(1.0, 1.0))], head=3)
    assert figures.reward == pytest.approx(0.75)
    assert figures.staleness_mean == pytest.approx(0.5)
    assert figures.staleness_max == 1
    assert figures.truncated == pytest.approx(0.5)
    assert (figures.sampled_tokens, figures.episodes, figures.signal_groups) == (8, 4, 1)


# ------------------------------------------------------------------------------------------------------- residency


def ref(version: int, run: str = "r") -> AdapterRef:
    return AdapterRef(version, f"{run}-v{version:06d}-aaaaaaaa", f"k{version}", 1, "0" * 64)


def head(run: str = "r", **changes: Any) -> Head:
    fields: dict[str, Any] = {
        "run": run, "fleet": "f", "incarnation": "i", "epoch": 2, "learner": "l", "step": 5, "head": 5, "active": 4,
        "max_staleness": 1, "state": "running", "live": [ref(4, run), ref(5, run)],
    }  # fmt: skip
    return Head(**{**fields, **changes})


def record(version: int, **changes: Any) -> VersionRecord:
    fields: dict[str, Any] = {"run": "r", "incarnation": "i", "epoch": 2, "adapter": ref(version), "step": version}
    return VersionRecord(**{**fields, **changes})


def test_a_replica_wants_the_active_version_first_and_the_offered_one_last() -> None:
    names = [item.version for item in wanted({"r": head()}, {"r": {6: record(6)}}, "f")]
    assert names == [4, 5, 6]


def test_another_fleets_runs_are_not_wanted_and_ended_runs_come_last() -> None:
    heads = {
        "r": head(), "ended": head("ended", state="finished", live=[ref(9, "ended")], active=9, head=9),
        "elsewhere": head("elsewhere", fleet="g"),
    }  # fmt: skip
    assert [item.name.split("-")[0] for item in wanted(heads, {}, "f")] == ["r", "r", "ended"]


def test_an_offer_of_a_zombie_or_of_another_incarnation_is_ignored() -> None:
    assert offered(head(), {6: record(6, epoch=1)}) is None
    assert offered(head(), {6: record(6, incarnation="old")}) is None
    assert offered(head(), {6: record(6, state="committed")}) is None
    assert offered(head(), {5: record(5)}) is None


def test_a_group_counts_while_its_version_is_trainable_and_is_still_the_same() -> None:
    now = head(head=5, active=5, max_staleness=1)
    assert still_counts(now, 4, ref(4).name)
    assert not still_counts(now, 3, ref(3).name)
    assert not still_counts(now, 5, "r-v000005-bbbbbbbb"), "a version 5 that was lost and made again"
    assert not still_counts(now, 6, ref(6).name), "the run went back behind it"
    assert still_counts(head(head=1, active=0, live=[]), 0, None)
    assert not still_counts(now, 0, None)


# ----------------------------------------------------------------------------------------------------------- slots


def spec() -> RunSpec:
    return check(
        {
            "run": {"name": "new", "model": "m"},
            "tasks": {"source": "t.jsonl"},
            "environment": {"rewards": ["r.py:f"]},
            "fleet": {"name": "f"},
            "algorithm": {"max_staleness": 2},
        },
        "x",
    )


def test_a_fleet_with_too_few_slots_is_refused_with_the_sum() -> None:
    replica = Node(id="rep", node="replica", fleet="f", host="h", pid=1, state="ready", slots=6)
    check_slots(spec(), [], [replica])
    with pytest.raises(ConfigError, match=r"rep holds 6 adapters, but 4 \(new\) \+ 3 \(r\) = 7"):
        check_slots(spec(), [head()], [replica])
    check_slots(spec(), [head(state="finished")], [replica])


def test_a_fleet_whose_engines_take_smaller_adapters_is_refused_with_the_flag() -> None:
    def replica(rank: int) -> Node:
        return Node(id="rep", node="replica", fleet="f", host="h", pid=1, state="ready", slots=6, max_rank=rank)

    rank = spec().lora.rank
    check_ranks(spec(), [replica(0), replica(rank)])
    with pytest.raises(ConfigError, match=f"up to rank {rank - 1}, lora.rank is {rank}.*--max-lora-rank {rank}"):
        check_ranks(spec(), [replica(rank), replica(rank - 1)])


# ------------------------------------------------------------------------------------------------- leases, retention


def test_a_lease_is_overdue_only_after_its_limit_and_until_it_is_closed() -> None:
    leases = Leases(limit=10.0)
    assert leases.observe(["a", "b"], 0.0) == []
    assert leases.observe(["a"], 9.0) == []
    assert leases.observe(["a", "b"], 11.0) == ["a"], "b was given back and leased anew"
    assert leases.observe(["a", "b"], 12.0) == ["a"], "closing it failed"
    assert leases.observe(["b"], 13.0) == []


def test_retention_keeps_open_groups_and_what_is_young() -> None:
    day = 24 * 3600.0
    objects = [("runs/r/i/groups/open.s", 0.0), ("runs/r/i/groups/old.s", 0.0), ("runs/r/i/groups/new.s", 9.5 * day)]

    def removable(open_groups: set[str], keep_hours: float) -> list[str]:
        return removable_groups(objects, open_groups=open_groups, now=10 * day, keep_hours=keep_hours, grace_hours=24)

    assert removable({"open"}, keep_hours=48) == ["runs/r/i/groups/old.s"]
    assert removable(set(), keep_hours=0) == []
    assert removable(set(), keep_hours=1) == ["runs/r/i/groups/open.s", "runs/r/i/groups/old.s"]


def test_retention_of_versions_never_removes_what_the_head_refers_to() -> None:
    day = 24 * 3600.0
    objects = [(f"runs/r/i/adapters/{number:06d}.s", 0.0) for number in (1, 2, 8, 9)]

    def removable(referenced: set[str], keep: int) -> list[str]:
        return removable_versions(
            objects, newest=9, referenced=referenced, keep=keep, now=10 * day, grace_hours=24
        )  # fmt: skip

    assert removable({objects[1][0]}, keep=2) == ["runs/r/i/adapters/000001.s"]
    assert removable(set(), keep=0) == []


def test_of_two_blobs_of_one_group_the_one_that_no_commit_names_goes_once_it_is_old() -> None:
    hour = 3600.0
    objects = [
        ("runs/r/i/groups/twice.won", 0.0), ("runs/r/i/groups/twice.lost", hour), ("runs/r/i/groups/once.any", 0.0),
        ("runs/r/i/groups/open.a", 0.0), ("runs/r/i/groups/open.b", 0.0),
        ("runs/r/i/checkpoints/000003/state.won", 30 * hour), ("runs/r/i/checkpoints/000003/state.lost", 0.0),
    ]  # fmt: skip
    named = {place_of(key): key for key, _ in objects if key.endswith("won")}

    def lost(now: float) -> list[str]:
        return losers(contested(objects, now=now, grace_hours=24), named)

    assert lost(24 * hour) == []
    assert lost(24.5 * hour) == ["runs/r/i/checkpoints/000003/state.lost"], "the other is not a day old"
    assert lost(26 * hour) == ["runs/r/i/groups/twice.lost", "runs/r/i/checkpoints/000003/state.lost"]
    assert losers(contested(objects, now=99 * hour, grace_hours=24), {}) == [], "no commit has decided yet"


def test_rows_whose_arrays_do_not_fit_are_refused() -> None:
    from broker.errors import MalformedMessage

    good = Row.of([1, 2], [0, -1], [0, 1], [-1, 0])
    good.check()
    for bad in (
        Row.of([1, 2], [0], [0, 1], [-1, 0]),
        Row.of([1, 2], [-1, -1], [1, 1], [0, 0]),
        Row.of([1, 2], [0, np.nan], [0, 1], [-1, 0]),
        Row.of([1, 2], [0, -1], [0, 1], [-1, -1]),
        Row.of([], [], [], []),
    ):
        with pytest.raises(MalformedMessage):
            bad.check()


# --------------------------------------------------------------------------------------------------------- step log


def test_the_step_log_keeps_what_counts_and_drops_torn_lines_and_steps_that_were_lost(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    assert log.keep_until(3) == 0
    for step in (1, 2, 3):
        log.append({"step": step})
    path = tmp_path / "steps.jsonl"
    whole = path.read_text()
    assert log.keep_until(3) == 3
    assert path.read_text() == whole
    path.write_text(whole + '{"st')
    assert log.keep_until(2) == 2, "the run goes on from step 2: a later commit was lost"
    assert path.read_text() == whole.replace('{"step": 3}\n', "")
    other = StepLog(tmp_path)
    assert other.keep_until(2) == 2
    log.append({"step": 3})
    other.append({"step": 3})
    assert path.read_text() == whole, "what a displaced learner still writes is not in it"
    assert StepLog(None).keep_until(9) == 9, "nothing is missing where nothing is logged"
