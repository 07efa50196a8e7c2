"""Placement: eligible replicas only, groups together, load that always comes back to zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.blocks import BLOCK, HASH, chain
from router.groups import COMPLETE_AFTER, RESERVATION_SECONDS
from router.placement import DECODE_COST, SPILL_REQUESTS, Placement, Placer, Request


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def request(id: str, *, group: str = "", siblings: int | None = None, adapter: str | None = None, seed: int = 0,
            length: int = 64, most: int = 16, run: str = "", salt: str = "") -> Request:  # fmt: skip
    return Request(id, tokens(seed, length), most, adapter, group, siblings, run, salt)


def placer(*replicas: str, confirmed: tuple[str, ...] = (), cache_tokens: int = 65_536) -> Placer:
    subject = Placer()
    for replica in replicas:
        subject.update_replica(replica, confirmed=confirmed, accepts=True, cache_tokens=cache_tokens)
    return subject


def place(subject: Placer, asked: Request, now: float = 0.0) -> Placement:
    placed = subject.place(asked, now)
    assert placed is not None
    return placed


def end(subject: Placer, id: str, output_tokens: int = 8, cached_tokens: int = 0) -> None:
    assert subject.complete(id, output_tokens=output_tokens, cached_tokens=cached_tokens, prompt_tokens=64)


def test_a_request_goes_only_where_its_version_is_confirmed() -> None:
    subject = placer("a", "b")
    subject.update_replica("b", confirmed=["run-v1"], accepts=True, cache_tokens=4096)
    for number in range(20):
        assert place(subject, request(f"r{number}", adapter="run-v1", seed=number)).replica == "b"
    assert subject.place(request("x", adapter="run-v2"), 0.0) is None
    subject.update_replica("b", confirmed=["run-v1"], accepts=False, cache_tokens=4096)
    assert subject.place(request("y", adapter="run-v1"), 0.0) is None
    assert (subject.can_serve("run-v1"), subject.can_serve(None), subject.eligible(None)) == (False, True, ["a"])


def test_a_replica_to_avoid_is_chosen_only_where_no_other_is_eligible() -> None:
    subject = placer("a", "b", "c")
    subject.update_replica("c", confirmed=[], accepts=False, cache_tokens=4096)
    home = place(subject, request("r")).replica
    [other] = {"a", "b"} - {home}
    placed = subject.place(request("r"), 0.0, avoid=[home, "gone"])
    assert placed is not None
    assert placed.replica == other
    assert subject.place(request("r"), 0.0, avoid=["a", "b"]) is not None
    assert subject.place(request("s"), 0.0, avoid=["gone"]) is not None


@pytest.mark.parametrize("told", [True, False])
def test_the_members_of_a_group_go_to_one_replica_and_groups_spread(told: bool) -> None:
    subject = placer("a", "b", "c", "d")
    homes = []
    for group in range(8):
        places = {
            place(
                subject,
                request(f"{group}.{n}", group=f"g{group}" if told else "", siblings=8 if told else None, seed=group),
            ).replica
            for n in range(8)
        }
        assert len(places) == 1
        homes.append(places.pop())
    assert sorted(homes.count(replica) for replica in "abcd") == [2, 2, 2, 2]
    assert subject.placements == {"affinity": 56, "spill": 0, "unmatched": 8}


def test_a_group_shorter_than_a_block_stays_together_too() -> None:
    subject = placer("a", "b", "c")
    places = {place(subject, request(f"r{n}", group="g", siblings=4, length=BLOCK - 1)).replica for n in range(4)}
    assert len(places) == 1
    assert subject.placements["unmatched"] == 1


def test_missing_siblings_count_as_load_when_the_first_lands() -> None:
    subject = placer("a", "b")
    first = place(subject, request("1", group="g", siblings=8))
    assert first.reserved == 7 * round(8 * DECODE_COST)
    assert subject.load(first.replica) == first.work + first.reserved
    assert place(subject, request("2", group="h", siblings=8, seed=1)).replica != first.replica
    second = place(subject, request("3", group="g", siblings=8))
    assert second.replica == first.replica
    assert subject.load(first.replica) == first.work + second.work + 6 * round(8 * DECODE_COST)


def test_siblings_that_do_not_come_are_not_waited_for() -> None:
    subject = placer("a")
    first = place(subject, request("1", group="g", siblings=8), now=100.0)
    subject.expire(100.0 + RESERVATION_SECONDS)
    assert subject.load("a") > first.work
    subject.expire(100.1 + RESERVATION_SECONDS)
    assert subject.load("a") == first.work


def test_the_size_of_groups_that_nobody_names_is_learned() -> None:
    subject = placer("a", "b")
    for group in range(2 * COMPLETE_AFTER):
        for member in range(4):
            place(subject, request(f"{group}.{member}", seed=group))
            end(subject, f"{group}.{member}")
    fresh = place(subject, request("fresh", seed=1000))
    assert fresh.reserved == pytest.approx(3 * 8 * DECODE_COST, rel=0.05)


def test_the_size_of_groups_is_learned_where_many_begin_before_one_is_complete() -> None:
    """A hundred groups are open at once, as in a large fleet: a group's last member comes 99 groups late."""
    subject = placer("a", "b")
    for number in range(800):
        for member in range(4):
            group = number - 33 * member
            if group >= 0:
                place(subject, request(f"{group}.{member}", seed=group))
                end(subject, f"{group}.{member}")
    fresh = place(subject, request("fresh", seed=1000))
    assert fresh.reserved == pytest.approx(3 * 8 * DECODE_COST, rel=0.05)


def test_a_group_does_not_trip_its_own_spill() -> None:
    subject = placer("a", "b", "c", "d")
    for size in (8, 16, 32):
        places = {place(subject, request(f"{size}.{n}", group=f"{size}", siblings=size, seed=size)).replica
                  for n in range(size)}  # fmt: skip
        assert len(places) == 1
        for n in range(size):
            end(subject, f"{size}.{n}")


def test_a_group_leaves_a_replica_that_is_far_more_loaded_and_stays_together_there() -> None:
    subject = placer("a", "b")
    home = place(subject, request("1", group="g", siblings=4)).replica
    other = "b" if home == "a" else "a"
    for number in range(int(SPILL_REQUESTS) + 8):
        subject.update_replica(other, confirmed=(), accepts=False, cache_tokens=65_536)
        place(subject, request(f"x{number}", seed=1 + number))
    subject.update_replica(other, confirmed=(), accepts=True, cache_tokens=65_536)
    leaves = place(subject, request("2", group="g", siblings=4))
    assert (leaves.replica, leaves.kind) == (other, "spill")
    follows = place(subject, request("3", group="g", siblings=4))
    assert (follows.replica, follows.kind) == (other, "affinity")


def test_a_spill_costs_what_has_to_be_prefilled_anew() -> None:
    """With twenty thousand tokens cached a replica may be that much busier."""
    subject = placer("a", "b")
    home = place(subject, request("1", length=20_000)).replica
    end(subject, "1")
    other = "b" if home == "a" else "a"
    subject.update_replica(other, confirmed=(), accepts=False, cache_tokens=65_536)
    for number in range(150):
        place(subject, request(f"x{number}", seed=1 + number))
    subject.update_replica(other, confirmed=(), accepts=True, cache_tokens=65_536)
    assert subject.load(home) > 10_000
    assert place(subject, request("2", length=20_000)).replica == home
    short = place(subject, request("3", seed=1))
    assert (short.replica, short.kind) == (other, "spill")


def test_a_system_prompt_does_not_gather_everything_on_one_replica() -> None:
    subject = placer("a", "b", "c", "d")
    system = tokens(99, 1024)
    homes = []
    for number in range(40):
        prompt = np.concatenate([system, tokens(number, 50)]).astype(np.int32)
        homes.append(place(subject, Request(f"r{number}", prompt, 400)).replica)
    assert {homes.count(replica) for replica in "abcd"} <= set(range(8, 13))
    assert subject.placements["affinity"] <= 1


def test_the_next_turn_finds_the_replica_that_holds_its_history() -> None:
    subject = placer("a", "b", "c")
    prompt, output = tokens(1, 64), tokens(2, 33)
    first = place(subject, Request("1", prompt, 40))
    full = np.concatenate([prompt, output]).astype(np.int32)
    subject.complete("1", output_tokens=33, cached_tokens=0, prompt_tokens=64, blocks=chain(None, full)[4 * HASH :])
    placed = place(subject, Request("2", np.concatenate([full, tokens(3, 20)]).astype(np.int32), 40))
    assert (placed.replica, placed.cached, placed.kind) == (first.replica, 96, "affinity")


def test_members_of_one_group_find_their_own_history_after_a_spill() -> None:
    subject = placer("a", "b")
    prompt = tokens(1, 64)
    homes = {}
    for member in range(2):
        subject.update_replica("ab"[1 - member], confirmed=(), accepts=False, cache_tokens=65_536)
        homes[member] = place(subject, Request(f"{member}", prompt, 40, group="g", siblings=2)).replica
        subject.update_replica("ab"[1 - member], confirmed=(), accepts=True, cache_tokens=65_536)
    assert sorted(homes.values()) == ["a", "b"]
    for member in range(2):
        full = np.concatenate([prompt, tokens(10 + member, 32)]).astype(np.int32)
        subject.complete(f"{member}", output_tokens=32, cached_tokens=0, prompt_tokens=64,
                         blocks=chain(None, full)[4 * HASH :])  # fmt: skip
    for member in (1, 0):
        full = np.concatenate([prompt, tokens(10 + member, 32), tokens(5, 16)]).astype(np.int32)
        assert place(subject, Request(f"{member}b", full, 40, group="g", siblings=2)).replica == homes[member]


def test_a_salt_keeps_prompts_apart() -> None:
    subject = placer("a", "b")
    first = place(subject, request("1", salt="x"))
    assert place(subject, request("2", salt="y")).cached == 0
    assert place(subject, request("3", salt="x")).replica == first.replica
    assert place(subject, request("4", salt="x")).cached == 63


def test_load_is_counted_in_tokens_still_to_do() -> None:
    subject = placer("a", "b")
    long = place(subject, request("long", length=5000, seed=1))
    short = place(subject, request("short", seed=2))
    assert short.replica != long.replica
    for number in range(10):
        assert place(subject, request(f"r{number}", seed=3 + number)).replica == short.replica


def test_expected_lengths_are_learned_by_run_and_prompt() -> None:
    subject = placer("a")
    assert place(subject, request("0", most=400, run="r")).work == 64 + 200 * DECODE_COST
    end(subject, "0", output_tokens=100)
    for number in range(40):
        place(subject, request(f"brief{number}", most=400, run="r", seed=1))
        end(subject, f"brief{number}", output_tokens=10)
        place(subject, request(f"wordy{number}", most=400, run="r", seed=2))
        end(subject, f"wordy{number}", output_tokens=300)
    brief = place(subject, request("brief", most=400, run="r", seed=1)).work
    wordy = place(subject, request("wordy", most=400, run="r", seed=2)).work
    assert wordy > 4 * brief
    assert place(subject, request("capped", most=20, run="r", seed=2)).work <= 64 + 20 * DECODE_COST


def test_a_dead_replicas_requests_come_back_and_its_groups_move() -> None:
    subject = placer("a", "b")
    for number in range(6):
        place(subject, request(f"r{number}", group="g", siblings=6))
    home = subject.assigned_to("r0")
    assert home is not None
    assert sorted(subject.remove_replica(home)) == [f"r{number}" for number in range(6)]
    placed = place(subject, request("r0", group="g", siblings=6))
    assert placed.replica != home
    assert subject.load(home) == 0.0


def test_a_replica_that_joins_gets_its_share_of_new_groups_at_once() -> None:
    subject = placer("a", "b")
    for number in range(8):
        place(subject, request(f"r{number}", seed=number))
    subject.update_replica("c", confirmed=(), accepts=True, cache_tokens=65_536)
    for number in range(8, 11):
        assert place(subject, request(f"r{number}", seed=number)).replica == "c"
    assert place(subject, request("sibling", seed=0)).kind == "affinity"


def test_the_blocks_of_a_version_that_no_replica_has_any_more_are_forgotten() -> None:
    subject = placer("a", "b", confirmed=("v1", "v2"))
    for number in range(10):
        place(subject, request(f"r{number}", adapter=f"v{1 + number % 2}", seed=number))
    subject.update_replica("a", confirmed=["v2"], accepts=True, cache_tokens=65_536)
    assert subject.mirrored_blocks() == 40
    subject.update_replica("b", confirmed=["v2"], accepts=True, cache_tokens=65_536)
    assert subject.mirrored_blocks() == 20


def test_replicas_of_different_block_sizes_are_mirrored_each_in_its_own() -> None:
    subject = Placer()
    subject.update_replica("small", confirmed=(), accepts=True, cache_tokens=65_536, block=16)
    subject.update_replica("large", confirmed=(), accepts=True, cache_tokens=65_536, block=64)
    homes = {number: place(subject, request(f"r{number}", length=200, seed=number)).replica for number in range(6)}
    assert sorted(homes.values()) == ["large"] * 3 + ["small"] * 3
    for number, home in homes.items():
        again = place(subject, request(f"again{number}", length=200, seed=number))
        assert (again.replica, again.cached) == (home, 192)


@pytest.mark.parametrize("nonsense", [-1, 0, 5, 10**15])
def test_a_replica_that_reports_nonsense_is_served_all_the_same(nonsense: int) -> None:
    subject = Placer(max_bytes=1 << 20)
    subject.update_replica("a", confirmed=(), accepts=True, cache_tokens=nonsense, block=nonsense)
    for number in range(200):
        assert place(subject, request(f"r{number}", length=640, seed=number)).replica == "a"
    assert subject.memory() <= 1 << 20


def test_what_the_engine_publishes_decides_where_a_prompt_goes() -> None:
    subject = placer("a", "b", "c")
    prompt = tokens(1, 64)
    subject.cache_stored("c", None, chain(None, prompt))
    placed = place(subject, Request("1", prompt, 16))
    assert (placed.replica, placed.kind, placed.cached) == ("c", "affinity", 63)
    subject.complete("1")
    subject.cache_removed("c", chain(None, prompt))
    assert place(subject, Request("2", prompt, 16)).cached == 0
    subject.complete("2")
    subject.clear_cache("c")
    assert subject.mirrored_blocks() == 0


def test_work_that_others_placed_counts_as_they_say() -> None:
    subject = placer("a", "b")
    subject.report_others("a", 2, 5000.0)
    assert subject.load("a") == 5000.0
    subject.report_others("a", 1, 300.4)
    assert subject.load("a") == 300.0
    subject.report_others("a", 0)
    assert subject.load("a") == 0.0
    assert place(subject, request("1")).replica == "a"


def test_a_request_that_is_placed_twice_counts_once() -> None:
    subject = placer("a")
    first = place(subject, request("1"))
    assert subject.load("a") == first.work
    second = place(subject, request("1"))
    assert subject.load("a") == second.work
    assert subject.assigned("a") == ["1"]


def test_a_member_that_is_placed_again_is_not_another_sibling() -> None:
    subject = placer("a", "b")
    place(subject, request("1", group="g", siblings=4))
    reserved = place(subject, request("2", group="g", siblings=4)).reserved
    subject.complete("2")
    assert place(subject, request("2", group="g", siblings=4)).reserved == reserved


def test_an_unknown_request_ends_without_a_trace() -> None:
    subject = placer("a")
    assert not subject.complete("never placed", output_tokens=3, cached_tokens=5, prompt_tokens=8)
    assert (subject.load("a"), subject.cached_tokens) == (0.0, 0)


events = st.lists(
    st.tuples(
        st.sampled_from(["place", "complete", "fail", "die", "join", "confirm", "others", "expire", "evict"]),
        st.integers(0, 30),
        st.integers(1, 4),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=200)
@given(events, st.booleans())
def test_load_returns_to_zero_whatever_ends_in_whatever_order(moves: list[tuple[str, int, int]], told: bool) -> None:
    subject = Placer(max_bytes=64 * 1024)
    confirmed: dict[str, set[str]] = {}
    running: set[str] = set()

    def join(which: int, *adapters: str) -> None:
        name = f"r{which % 3}"
        confirmed[name] = set(adapters)
        subject.update_replica(name, confirmed=adapters, accepts=which % 7 > 0, cache_tokens=which * 100)

    for which in (1, 2, 3):
        join(which, "v1")
    for number, (move, which, siblings) in enumerate(moves):
        if move == "place":
            id = f"q{number}"
            asked = request(id, adapter=f"v{siblings % 3}", group=f"g{which % 5}" if told else "",
                            siblings=siblings if told else None, seed=which)  # fmt: skip
            placed = subject.place(asked, float(number))
            assert (placed is not None) == bool(subject.eligible(asked.adapter))
            if placed is not None:
                running.add(id)
                assert asked.adapter in confirmed[placed.replica], "a replica without its version"
        elif move in ("complete", "fail") and running:
            id = sorted(running)[which % len(running)]
            if move == "complete":
                end(subject, id, output_tokens=which, cached_tokens=16 * siblings)
            else:
                assert subject.complete(id)
            running.discard(id)
        elif move == "die":
            running -= set(subject.remove_replica(f"r{which % 3}"))
            confirmed.pop(f"r{which % 3}", None)
        elif move == "others":
            subject.report_others(f"r{which % 3}", which, float(which) if siblings % 2 else None)
        elif move == "expire":
            subject.expire(float(number * which))
        elif move == "evict":
            subject.clear_cache(f"r{which % 3}")
        else:
            join(which, *(["v1", "v2"] if move == "confirm" else ["v1"]))
        assert subject.memory() <= 64 * 1024
    for id in running:
        assert subject.complete(id)
    subject.expire(1e9)
    for replica in subject.replicas():
        subject.report_others(replica, 0)
    assert all(subject.load(replica) == 0.0 for replica in subject.replicas())
