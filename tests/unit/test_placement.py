"""Placement: eligible replicas only, groups together, load that always comes back to zero."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.blocks import BLOCK, chain
from router.placement import SPILL_TOKENS, Placer, Request


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def request(id: str, *, group: str = "", siblings: int = 1, adapter: str | None = None, seed: int = 0,
            length: int = 64, output: int = 16) -> Request:  # fmt: skip
    return Request(id, group, siblings, adapter, tokens(seed, length), output)


def placer(*replicas: str, confirmed: tuple[str, ...] = ()) -> Placer:
    subject = Placer()
    for replica in replicas:
        subject.update_replica(replica, confirmed=confirmed, accepts=True, cache_tokens=4096)
    return subject


def test_a_request_goes_only_where_its_version_is_confirmed() -> None:
    subject = placer("a", "b")
    subject.update_replica("b", confirmed=["run-v1"], accepts=True, cache_tokens=4096)
    for number in range(20):
        placed = subject.place(request(f"r{number}", adapter="run-v1", seed=number), 0.0)
        assert placed is not None
        assert placed.replica == "b"
    assert subject.place(request("x", adapter="run-v2"), 0.0) is None
    subject.update_replica("b", confirmed=["run-v1"], accepts=False, cache_tokens=4096)
    assert subject.place(request("y", adapter="run-v1"), 0.0) is None


def test_the_members_of_a_group_go_to_one_replica_and_groups_spread() -> None:
    subject = placer("a", "b", "c", "d")
    homes = []
    for group in range(8):
        places = {
            subject.place(request(f"{group}.{n}", group=f"g{group}", siblings=8, seed=group), 0.0).replica  # type: ignore[union-attr]
            for n in range(8)
        }
        assert len(places) == 1
        homes.append(places.pop())
    assert sorted(homes.count(replica) for replica in "abcd") == [2, 2, 2, 2]


def test_missing_siblings_count_as_load_when_the_first_lands() -> None:
    subject = placer("a", "b")
    first = subject.place(request("1", group="g", siblings=8), 0.0)
    other = subject.place(request("2", group="h", siblings=8, seed=1), 0.0)
    assert first is not None
    assert other is not None
    assert first.replica != other.replica
    assert subject.load(first.replica) > 7 * 16


def test_a_group_spills_when_its_replica_is_far_more_loaded() -> None:
    subject = placer("home")
    subject.place(request("1", group="g", siblings=3), 0.0)
    subject.update_replica("idle", confirmed=(), accepts=True, cache_tokens=4096)
    stays = subject.place(request("2", group="g", siblings=3), 0.0)
    assert stays is not None
    assert (stays.replica, stays.kind) == ("home", "affinity")
    subject.update_replica("idle", confirmed=(), accepts=False, cache_tokens=4096)
    subject.place(request("big", seed=5, output=SPILL_TOKENS), 0.0)
    subject.update_replica("idle", confirmed=(), accepts=True, cache_tokens=4096)
    leaves = subject.place(request("3", group="g", siblings=3), 0.0)
    assert leaves is not None
    assert (leaves.replica, leaves.kind) == ("idle", "spill")


def test_the_next_turn_finds_the_replica_that_holds_its_history() -> None:
    subject = placer("a", "b", "c")
    prompt, output = tokens(1, 64), tokens(2, 32)
    first = subject.place(Request("1", "", 1, None, prompt, 16), 0.0)
    assert first is not None
    full = np.concatenate([prompt, output]).astype(np.int32)
    subject.complete("1", chain(None, full)[len(prompt) // BLOCK :])
    placed = subject.place(Request("2", "", 1, None, np.concatenate([full, tokens(3, 20)]).astype(np.int32), 16), 0.0)
    assert placed is not None
    assert placed.replica == first.replica
    assert placed.cached == 96
    assert placed.kind == "affinity"


def test_blocks_of_one_version_never_match_those_of_another() -> None:
    prompt = tokens(1, 64)
    assert not set(chain("run-v1", prompt)) & set(chain("run-v2", prompt))
    assert not set(chain(None, prompt)) & set(chain("run-v1", prompt))
    assert chain("run-v1", prompt)[:2] == chain("run-v1", prompt[:40])


def test_a_dead_replicas_requests_come_back_and_its_groups_move() -> None:
    subject = placer("a", "b")
    for number in range(6):
        subject.place(request(f"r{number}", group="g", siblings=6), 0.0)
    home = subject.assigned_to("r0")
    assert home is not None
    assert sorted(subject.remove_replica(home)) == [f"r{number}" for number in range(6)]
    placed = subject.place(request("r0", group="g", siblings=6), 0.0)
    assert placed is not None
    assert placed.replica != home


events = st.lists(
    st.tuples(st.sampled_from(["place", "complete", "die", "join"]), st.integers(0, 30), st.integers(1, 4)),
    max_size=120,
)


@settings(deadline=None)
@given(events)
def test_load_returns_to_zero_when_all_requests_have_ended(moves: list[tuple[str, int, int]]) -> None:
    subject = placer("r0", "r1", "r2")
    running: set[str] = set()
    for number, (move, which, siblings) in enumerate(moves):
        if move == "place":
            id = f"q{number}"
            if subject.place(request(id, group=f"g{which % 5}", siblings=siblings, seed=which), float(number)):
                running.add(id)
        elif move == "complete" and running:
            id = sorted(running)[which % len(running)]
            assert subject.complete(id)
            running.discard(id)
        elif move == "die":
            running -= set(subject.remove_replica(f"r{which % 3}"))
        else:
            subject.update_replica(f"r{which % 3}", confirmed=(), accepts=True, cache_tokens=which)
    for id in running:
        assert subject.complete(id)
    subject.expire(1e9)
    assert all(abs(subject.load(replica)) < 1e-6 for replica in subject.replicas())
    assert not subject.complete("never placed")
