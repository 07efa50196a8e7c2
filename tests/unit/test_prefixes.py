"""The mirrors of the replicas' caches: bounded, in order of use, corrected, and forked only by prompts."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.blocks import HASH
from router.prefixes import BLOCK_BYTES, LEAST_LIMIT, Match, Prefixes


def chained(*blocks: int, seed: str = "") -> bytes:
    """A chain in which each hash depends on all before it."""
    out, before = b"", seed
    for block in blocks:
        before = f"{before}/{block}"
        out += hash(before).to_bytes(HASH, "little", signed=True)
    return out


def prefixes(slots: int = 2, capacity: int = 1000, max_bytes: int = 1 << 30) -> Prefixes:
    subject = Prefixes(max_bytes=max_bytes)
    for slot in range(slots):
        subject.add(slot, capacity)
    return subject


def use(subject: Prefixes, chain: bytes, slot: int, remainder: int = 0) -> Match:
    match = subject.match("", chain, remainder)
    subject.use(match, slot)
    return match


def depth(subject: Prefixes, chain: bytes, slot: int) -> int:
    return subject.depth(subject.match("", chain, 0), slot)[0]


def test_what_a_replica_was_sent_is_found_there_and_nowhere_else() -> None:
    subject = prefixes()
    chain = chained(1, 2, 3, 4)
    use(subject, chain, 0)
    assert subject.match("", chain, 0).matched == 4
    assert (depth(subject, chain, 0), depth(subject, chain, 1)) == (4, 0)
    assert depth(subject, chained(1, 2, 9), 0) == 2
    assert subject.match("other", chain, 0).matched == 0
    use(subject, chained(1, 2, 9), 1)
    assert (depth(subject, chain, 1), depth(subject, chain, 0)) == (2, 4)


def test_blocks_in_which_prompts_fork_are_common_whoever_holds_them() -> None:
    subject = prefixes(slots=3)
    use(subject, chained(1, 2, 3), 0)
    match = subject.match("", chained(1, 2, 4), 0)
    assert (match.matched, match.common) == (2, 2), "the second prompt itself makes the fork"
    assert subject.holders(match) == []
    subject.use(match, 1)
    again = subject.match("", chained(1, 2, 3), 0)
    assert (again.common, subject.holders(again)) == (2, [0])


def test_a_prompt_that_every_replica_holds_is_not_common() -> None:
    subject = prefixes(slots=4)
    for slot in range(4):
        use(subject, chained(1, 2, 3), slot)
    match = subject.match("", chained(1, 2, 3), 0)
    assert match.common == 0
    assert sorted(subject.holders(match)) == [0, 1, 2, 3]


def test_answers_do_not_make_a_prompt_common_but_two_remainders_do() -> None:
    subject = prefixes()
    prompt = chained(1, 2)
    use(subject, prompt, 0, remainder=7)
    for answer in range(8):
        subject.settle("", prompt, chained(1, 2, 10 + answer, 5)[2 * HASH :], 0)
    assert subject.match("", prompt, 7).common == 0
    assert subject.holders(subject.match("", chained(1, 2, 13, 5, 6), 0)) == [0]
    assert subject.match("", prompt, 8).common == 2
    use(subject, prompt, 1, remainder=8)
    assert subject.match("", prompt, 7).common == 2


def test_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    subject = prefixes(slots=1, capacity=LEAST_LIMIT)
    first, second = chained(*range(30)), chained(*range(100, 130))
    use(subject, first, 0)
    use(subject, second, 0)
    use(subject, first, 0)
    use(subject, chained(*range(200, 214)), 0)
    assert depth(subject, first, 0) == 30
    assert depth(subject, second, 0) == 20
    assert subject.blocks(0) == LEAST_LIMIT


def test_a_replica_that_lost_settled_blocks_gets_a_smaller_mirror_which_grows_back() -> None:
    subject = prefixes(slots=1, capacity=1000)
    for number in range(40):
        use(subject, chained(*range(number * 100, number * 100 + 25)), 0)
    assert subject.blocks(0) == 1000
    subject.correct(0, settled=20, believed=25, cached=19)
    assert subject.limit(0) == 1000, "one block less is the last token's"
    subject.correct(0, settled=20, believed=25, cached=3)
    assert subject.limit(0) == subject.blocks(0) == 950
    for _ in range(20):
        subject.correct(0, settled=0, believed=0, cached=3)
    assert subject.limit(0) == 1000


def test_only_what_has_been_computed_is_settled() -> None:
    subject = prefixes()
    chain = chained(1, 2, 3)
    use(subject, chain, 0)
    assert subject.depth(subject.match("", chain, 0), 0) == (3, 0)
    subject.settle("", chain, chained(1, 2, 3, 4)[3 * HASH :], 0)
    assert subject.depth(subject.match("", chained(1, 2, 3, 4, 5), 0), 0) == (4, 4)


def test_what_an_engine_publishes_is_believed() -> None:
    subject = prefixes()
    chain = chained(1, 2, 3, 4)
    subject.stored("", chain, 1)
    assert depth(subject, chain, 1) == 4
    subject.removed([chain[3 * HASH :], chain[2 * HASH : 3 * HASH]], 1)
    assert depth(subject, chain, 1) == 2
    assert subject.holders(subject.match("", chain, 0)) == [1]
    subject.removed([chain[:HASH], chain[HASH : 2 * HASH]], 1)
    assert subject.holders(subject.match("", chain, 0)) == [], "who has removed all of it is no place for it"
    use(subject, chain, 1)
    assert depth(subject, chain, 1) == 4
    subject.clear(1)
    assert (depth(subject, chain, 1), subject.blocks(1)) == (0, 0)


def test_a_space_that_nobody_asks_in_is_forgotten() -> None:
    subject = prefixes()
    for space in ("v1", "v2"):
        for slot in range(2):
            subject.use(subject.match(space, chained(1, 2, 3, seed=space), 0), slot)
    subject.forget("v1")
    assert subject.spaces() == ["v2"]
    assert subject.total_blocks() == 6
    assert subject.match("v1", chained(1, 2, 3, seed="v1"), 0).matched == 0
    subject.forget("v2")
    assert (subject.total_blocks(), subject.memory()) == (0, 0)


def fill(subject: Prefixes, chains: Sequence[tuple[int, bytes]]) -> None:
    for slot, chain in chains:
        subject.use(subject.match("", chain, 0), slot)


def test_a_mirrored_block_takes_a_hundred_bytes_at_most() -> None:
    """Prompts of 25 blocks behind a common one, in caches that evict: measured, not accounted."""
    dice = np.random.default_rng(0)
    tail = dice.integers(0, 2**63, (4000, 24), dtype=np.uint64)
    root = dice.bytes(HASH)
    gc.collect()
    tracemalloc.start()
    subject = prefixes(slots=8, capacity=8192)
    fill(subject, [(number % 8, root + tail[number].tobytes()) for number in range(4000)])
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert subject.total_blocks() == 8 * 8192
    assert used <= subject.memory() <= BLOCK_BYTES * subject.total_blocks()


def test_memory_stays_under_a_hundred_bytes_for_each_block_of_the_caches_whatever_the_prompts_look_like() -> None:
    """Prompts of a single block are the worst: they have an own run each."""
    dice = np.random.default_rng(0)
    singles = dice.integers(0, 2**63, 20_000, dtype=np.uint64)
    gc.collect()
    tracemalloc.start()
    subject = prefixes(slots=4, capacity=4096)
    fill(subject, [(number % 4, singles[number].tobytes()) for number in range(20_000)])
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0 < subject.total_blocks() < 4 * 4096
    assert used <= subject.memory() <= BLOCK_BYTES * 4 * 4096


def test_all_mirrors_together_stay_within_what_they_may_take() -> None:
    subject = prefixes(slots=4, capacity=10_000, max_bytes=400_000)
    dice = np.random.default_rng(0)
    fill(subject, [(number % 4, dice.bytes(20 * HASH)) for number in range(2000)])
    assert subject.total_blocks() == 4 * 1000
    assert subject.memory() <= 400_000
    subject.remove(3)
    fill(subject, [(number % 3, dice.bytes(20 * HASH)) for number in range(2000)])
    assert subject.total_blocks() == 3 * 1333
    assert subject.memory() <= 400_000


moves = st.lists(
    st.tuples(
        st.sampled_from(["use", "settle", "stored", "removed", "clear", "forget", "leave", "add", "correct"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 2), min_size=1, max_size=8),
        st.integers(0, 2),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=150)
@given(moves)
def test_the_tree_stays_whole_whatever_happens(steps: list[tuple[str, int, list[int], int]]) -> None:
    subject = prefixes(slots=3, capacity=LEAST_LIMIT)
    there = {0, 1, 2}
    for what, slot, blocks, number in steps:
        space = f"v{number}"
        chain = chained(*blocks, seed=space)
        if what == "add":
            subject.add(slot, LEAST_LIMIT + number)
            there.add(slot)
        elif what == "leave":
            subject.remove(slot)
            there.discard(slot)
        elif what == "forget":
            subject.forget(space)
        elif slot not in there:
            continue
        elif what == "use":
            match = subject.match(space, chain, number)
            subject.use(match, slot)
            assert subject.depth(subject.match(space, chain, number), slot)[0] == len(blocks)
        elif what == "settle":
            subject.settle(space, chain, chained(*blocks, 7, 8, seed=space)[len(chain) :], slot)
        elif what == "stored":
            subject.stored(space, chain, slot)
        elif what == "removed":
            subject.removed([chain[:HASH]], slot)
        elif what == "clear":
            subject.clear(slot)
        else:
            subject.correct(slot, settled=5, believed=5, cached=number * 3)
        check(subject)
    for slot in list(there):
        subject.remove(slot)
    assert subject.memory() == 0


def check(subject: Prefixes) -> None:
    """Count everything anew, and look that each replica has what comes before whatever it has."""
    runs = [run for space in subject._spaces.values() for run in space.runs.values()]
    held: dict[int, int] = dict.fromkeys(subject._mirrors, 0)
    for space in subject._spaces.values():
        for first, run in space.runs.items():
            assert run.hashes[:HASH] == first
            assert run.holds is not None
            assert run.parent is None or run.parent in space.runs.values()
            assert run.children == sum(other.parent is run for other in space.runs.values())
            assert run.forks == sum(other.parent is run and other.asked for other in space.runs.values())
            for hold in run.holders():
                assert 0 < hold.blocks <= len(run.hashes) // HASH
                assert 0 <= hold.settled <= hold.blocks
                held[hold.slot] += hold.blocks
                if run.parent is not None:
                    above = run.parent.hold_of(hold.slot)
                    assert above is not None
                    assert above.blocks * HASH == len(run.parent.hashes)
    assert {slot: mirror.blocks for slot, mirror in subject._mirrors.items()} == held
    assert subject._runs == len(runs)
    assert subject._hashes == sum(len(run.hashes) for run in runs)
    assert subject._holds == sum(len(list(run.holders())) for run in runs)
    for slot in subject._mirrors:
        assert subject.blocks(slot) <= subject.limit(slot)
