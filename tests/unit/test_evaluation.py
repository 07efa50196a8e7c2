"""An evaluation's arithmetic, its order of tasks and versions, and what an actor answers."""

from __future__ import annotations

import asyncio
import itertools
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.episode import GroupOutcome
from actors.evaluations import Evaluations, Slots, _spec_for
from actors.residency import wanted
from broker.errors import GenerationError
from broker.messages import AdapterRef, EvaluationTask, GenerateReply, Node, pack_floats, pack_ids
from broker.registry import Roster
from deploy.config import check
from deploy.view import evaluation_lines
from learner.evaluation import Estimate, TaskScore, estimate, figures_of, pass_at_k, powers_of_two, sentence
from learner.evaluations import Due, Schedule
from learner.rota import ASIDE_SECONDS, ATTEMPTS, LOSSES, Rota, allowance
from tests.unit.test_feeder_and_intake import SPEC
from tests.unit.test_learner_parts import head

# ---------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        outcomes = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            choices = list(itertools.combinations(outcomes, k))
            share = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k(samples, successes, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    samples, k, chance = 6, 3, 0.3
    expected = sum(
        math.comb(samples, hits) * chance**hits * (1 - chance) ** (samples - hits) * pass_at_k(samples, hits, k)
        for hits in range(samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k)


@pytest.mark.parametrize(("samples", "successes", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_of_the_impossible_is_refused(samples: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= successes <= samples"):
        pass_at_k(samples, successes, k)


def test_k_goes_by_powers_of_two_up_to_the_samples() -> None:
    assert [powers_of_two(most) for most in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        found = estimate((random.binomial(8, 0.6, size=50) / 8).tolist())
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.6 <= found.high
    assert covered / 2000 == pytest.approx(0.95, abs=0.02)


def test_an_interval_is_over_tasks_and_stays_where_the_value_can_be() -> None:
    assert estimate([0.5]) == Estimate(0.5), "one task tells nothing of others"
    found = estimate([0.0, 1.0])
    assert found.mean == 0.5
    assert found.high == pytest.approx(0.5 + 1.959964 * math.sqrt(0.5) / math.sqrt(2))
    assert estimate([0.0, 1.0], bounds=(0.0, 1.0)) == Estimate(0.5, 0.0, 1.0)
    # Eight samples of each of two tasks are two observations, not sixteen.
    scores = [TaskScore([1.0] * 8, [3] * 8), TaskScore([0.0] * 8, [5] * 8, truncated=4)]
    figures = figures_of(scores, success=1.0)
    assert figures["reward_high"] == found.high
    assert (figures["length"], figures["truncated"]) == (4.0, 0.25)


def test_a_success_is_a_reward_that_reaches_the_threshold() -> None:
    scores = [TaskScore([0.4, 0.5, 0.9, 0.1], [1] * 4), TaskScore([0.0, 0.0, 0.0, 0.5], [1] * 4)]
    assert figures_of(scores, success=1.0)["pass_at_4"] == 0.0
    figures = figures_of(scores, success=0.5)
    assert figures["pass_at_1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert figures["pass_at_2"] == pytest.approx((pass_at_k(4, 2, 2) + pass_at_k(4, 1, 2)) / 2)
    assert figures["pass_at_4"] == 1.0


def test_a_result_is_told_with_its_intervals_and_with_the_tasks_it_is_from() -> None:
    figures = figures_of([TaskScore([1.0, 0.0], [1, 1]), TaskScore([1.0, 1.0], [1, 1])], success=1.0)
    told = sentence({**figures, "tasks": 2.0, "failed_tasks": 1.0})
    assert told == "reward 0.750 [0.260, 1.240], pass@1 0.750 [0.260, 1.000], pass@2 1.000 [1.000, 1.000] " \
        "(2 tasks, 1 more failed)"  # fmt: skip
    gauges = {f"eval_{name}": value for name, value in {**figures, "tasks": 2.0, "version": 4.0}.items()}
    lines = evaluation_lines({**gauges, "evaluating": 6.0, "evaluating_done": 1.0, "evaluating_tasks": 3.0})
    assert lines[0].startswith("evaluation of version 4: reward 0.750")
    assert lines[1] == "evaluating version 6: 1 of 3 tasks"
    assert evaluation_lines({}) == []


# ----------------------------------------------------------------------------------------------------------- the order


def due(version: int) -> Due:
    return Due(version, None, version)


def test_every_nth_version_is_due_and_the_first_and_the_last() -> None:
    assert [version for version in range(10) if Schedule(4, 0).is_due(version)] == [0, 4, 8]
    assert [version for version in range(10) if Schedule(4, 1).is_due(version)] == [1, 4, 8], "a branched run has no 0"
    schedule = Schedule(4, 0)
    schedule.published(due(9))
    assert schedule.waiting is None
    schedule.published(due(9), last=True)
    assert schedule.begin() == due(9)


def test_a_version_that_waits_gives_way_to_the_next_one_that_is_due() -> None:
    schedule = Schedule(2, 0)
    schedule.published(due(0))
    assert schedule.begin() == due(0)
    assert schedule.published(due(2)) is None
    assert schedule.published(due(4)) == due(2), "and that is said"
    assert schedule.published(due(4), last=True) is None
    assert schedule.published(due(2)) == due(2), "an older one takes nobody's place"
    schedule.end(evaluated=True)
    assert schedule.begin() == due(4)
    schedule.published(due(4), last=True)
    assert schedule.waiting is None, "it is under way"
    schedule.end(evaluated=True)
    schedule.published(due(4), last=True)
    assert schedule.waiting is None, "nothing is evaluated twice"
    schedule.published(due(6))
    schedule.evaluated.add(6)
    assert schedule.begin() is None, "its result was found meanwhile"


def test_at_a_start_the_newest_version_that_is_due_and_has_no_result_is_made_up_for() -> None:
    schedule = Schedule(4, 0)
    assert schedule.newest_due(0) == 0
    assert schedule.newest_due(7) == 4
    schedule.evaluated = {0, 4}
    assert schedule.newest_due(7) is None
    assert schedule.newest_due(8) == 8
    assert Schedule(4, 1).newest_due(3) == 1


def test_an_actor_has_a_quarter_of_its_episodes_for_evaluations_and_one_task_at_least() -> None:
    assert [allowance(capacity, 4) for capacity in (1, 15, 16, 64)] == [1, 1, 1, 4]
    rota = Rota(100, 4, seconds=60)
    given = rota.assign({"large": 64, "small": 16}, 0.0)
    assert sorted(assignment.actor for assignment in given) == ["large"] * 4 + ["small"]
    assert rota.assign({"large": 64, "small": 16}, 1.0) == []
    rota.complete(given[0].index)
    assert [assignment.actor for assignment in rota.assign({"large": 64, "small": 16}, 2.0)] == [given[0].actor]


def test_a_task_whose_actor_is_gone_goes_to_another_until_it_is_to_blame_itself() -> None:
    rota = Rota(1, 1, seconds=60)
    for number in range(LOSSES):
        [given] = rota.assign({f"a{number}": 4}, float(number))
        assert given.actor == f"a{number}"
        assert given.attempt == number + 1
    assert rota.assign({"b": 4}, 10.0) == []
    assert rota.finished
    assert "were lost with it" in rota.failed[0]


def test_a_failed_task_has_a_second_attempt_and_no_third() -> None:
    rota = Rota(2, 1, seconds=60)
    for number in range(ATTEMPTS):
        rota.assign({"a": 16}, float(number))
        rota.fail(0, f"reason {number}")
    assert rota.failed == {0: "reason 1"}
    assert rota.complete(1)
    assert not rota.complete(1), "a second answer is one too many"
    assert not rota.complete(0)
    assert rota.finished


def test_a_task_that_nobody_answers_is_overdue() -> None:
    rota = Rota(1, 1, seconds=60)
    rota.assign({"a": 4}, 0.0)
    assert rota.assign({"a": 4}, 60.0) == []
    [again] = rota.assign({"a": 4}, 61.0)
    assert again.attempt == 2
    rota.assign({"a": 4}, 200.0)
    assert "has not answered for 60 s" in rota.failed[0]


def test_an_actor_that_refuses_is_left_alone_for_a_while_and_costs_no_attempt() -> None:
    rota = Rota(1, 1, seconds=60)
    rota.assign({"a": 4}, 0.0)
    rota.refuse(0, "other code", 0.0)
    assert rota.assign({"a": 4}, 1.0) == []
    assert [given.actor for given in rota.assign({"a": 4, "b": 4}, 1.0)] == ["b"]
    rota.refuse(0, "other code", 1.0)
    assert [given.actor for given in rota.assign({"a": 4, "b": 4}, ASIDE_SECONDS)] == ["a"]
    assert rota.refusals == {"a": "other code", "b": "other code"}
    assert rota.failed == {}


# ------------------------------------------------------------------------------------------------------ pins and slots


def ref(version: int, run: str = "r") -> AdapterRef:
    return AdapterRef(version=version, name=f"{run}-v{version:06d}-x", key=f"k{version}", size=1, sha256="0" * 64)


def test_a_pinned_version_is_wanted_after_what_runs_need_and_before_what_ended_ones_keep() -> None:
    going = head(run="r", fleet="f", head=3, active=3, live=[ref(2), ref(3)])
    over = head(run="old", fleet="f", head=9, active=9, live=[ref(9, "old")], state="finished")
    names = [found.version for found in wanted({"r": going, "old": over}, {}, "f", [ref(1), ref(3)])]
    assert names == [3, 2, 1, 9]


def node(id: str, kind: Any, *pins: AdapterRef, fleet: str = "f") -> Node:
    return Node(id=id, node=kind, fleet=fleet, host="h", pid=1, state="ready", pins=list(pins))


def test_pins_are_those_of_the_present_and_learners_come_first() -> None:
    roster = Roster.__new__(Roster)
    now = 0.0
    roster._clock = lambda: now
    nodes = [node("a", "evaluator", ref(5)), node("l", "learner", ref(7)), node("x", "evaluator", ref(6), fleet="g")]
    roster._nodes = {each.id: (each, 0.0) for each in nodes}
    assert [pin.version for pin in roster.pinned("f")] == [7, 5]
    now = 100.0
    assert roster.pinned("f") == [], "what was not heard of for long is pinned no more"


def test_a_run_with_an_evaluation_needs_a_slot_more() -> None:
    plain = {
        "run": {"name": "r", "model": "m"}, "tasks": {"source": "t.jsonl"}, "environment": {"rewards": ["r.py:f"]},
        "algorithm": {"max_staleness": 3},
    }  # fmt: skip
    assert check(plain, "x").adapter_slots == 5
    evaluated = plain | {"evaluation": {"source": "h.jsonl"}}
    assert check(evaluated, "x").adapter_slots == 6
    assert check(evaluated | {"fleet": {"eval_slots": 2}}, "x").adapter_slots == 7


# ----------------------------------------------------------------------------------------------------------- the actor


async def test_slots_are_given_in_order_and_a_task_larger_than_all_runs_alone() -> None:
    slots, order = Slots(4), list[int]()

    async def take(samples: int) -> None:
        await slots.take(samples)
        order.append(samples)

    waiting = [asyncio.create_task(take(samples)) for samples in (2, 9, 1, 2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [2], "the large one waits, and nobody overtakes it"
    waiting[2].cancel()
    slots.give(2)
    await asyncio.wait(waiting[:2])
    assert (order, slots.taken) == ([2, 9], 9)
    slots.give(9)
    await waiting[3]
    assert (order, slots.taken) == ([2, 9, 2], 2)


TASK = EvaluationTask(
    id="e-0-1", evaluator="e", run="r", incarnation="i", index=0, columns={}, samples=2, seed=1, version=3,
    adapter="r-v000003-x", temperature=0.5, top_p=0.9, max_new_tokens=99,
)  # fmt: skip


def subject(generator: Any = None) -> Evaluations:
    nothing: Any = SimpleNamespace(eos_ids=[1])
    return Evaluations(
        nothing, generator, nothing, nothing, nothing, nothing, actor="a", context=128, max_inflight=8
    )  # fmt: skip


async def test_a_token_of_another_version_fails_its_sample() -> None:
    asked: list[Any] = []

    class Generator:
        adapter = "r-v000003-x"

        def request_id(self, *parts: object) -> str:
            return "x"

        async def generate(self, request: Any) -> GenerateReply:
            asked.append(request)
            return GenerateReply(
                id="x", replica="replica", token_ids=pack_ids([1]), logprobs=pack_floats([0.0]), finish="stop",
                adapter=self.adapter, version=3, cached_tokens=0, seconds=0.0,
            )  # fmt: skip

    generator = Generator()
    generate = subject(generator)._generate_for(TASK)
    sampled = await generate(0, 0, np.asarray([5], np.int32), 99)
    assert sampled.version == 3
    assert (asked[0].adapter, asked[0].version, asked[0].temperature, asked[0].top_p) == ("r-v000003-x", 3, 0.5, 0.9)
    generator.adapter = "r-v000003-other"
    with pytest.raises(GenerationError, match=r"where version 3 .* was asked") as caught:
        await generate(0, 0, np.asarray([5], np.int32), 99)
    assert not caught.value.retryable


def test_a_task_of_which_one_sample_failed_is_not_reported_as_if_it_were_whole() -> None:
    from actors.episode import EpisodeFailure

    failure = EpisodeFailure(index=1, category="environment", reason="it broke", sampled_tokens=3)
    good: Any = SimpleNamespace(index=0, reward=1.0, sampled_tokens=2, truncated=True)
    answer = subject()._scored(TASK, GroupOutcome([good], [failure], {}, 0))
    assert answer.rewards == []
    assert answer.failure == "environment: 1 of 2 samples failed: it broke"
    whole = subject()._scored(TASK, GroupOutcome([good, good], [], {}, 0))
    assert (whole.rewards, whole.truncated, whole.failure) == ([1.0, 1.0], 2, "")


def test_the_longest_reply_is_the_evaluations_own_whatever_shaping_the_run_has() -> None:
    shaped = msgspec.structs.replace(SPEC, algorithm=msgspec.structs.replace(SPEC.algorithm, overlong_buffer=200))
    assert _spec_for(TASK, shaped).sampling.max_new_tokens == 99
