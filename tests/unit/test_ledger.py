"""The ledger is exact, whatever arrives and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.ledger import OUTCOMES, Ledger, LedgerError, Outcome


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(OUTCOMES)), max_size=60), st.integers(0, 15))
def test_the_balance_holds_and_each_group_is_closed_once(closings: list[tuple[int, Outcome]], issued: int) -> None:
    ledger = Ledger()
    for number in range(issued):
        ledger.issue(f"g{number}")
    closed: set[int] = set()
    for number, outcome in closings:
        accepted = ledger.close(f"g{number}", outcome)
        assert accepted == (number < issued and number not in closed)
        closed |= {number} if accepted else set()
        ledger.check()
    assert ledger.late == len(closings) - len(closed)
    assert Ledger.from_state(ledger.to_state()).counts() == ledger.counts()


def test_a_commit_records_the_closings_that_take_effect_with_it_and_leaves_the_ledger_alone() -> None:
    ledger = Ledger()
    for number in range(3):
        ledger.issue(f"g{number}")
    state = ledger.to_state([("g0", "trained"), ("g1", "skipped")])
    assert ledger.open_groups == 3
    restored = Ledger.from_state(state)
    assert restored.counts() == {
        "issued": 3, "open": 1, "trained": 1, "dropped": 0, "skipped": 1, "failed": 0, "expired": 0, "late": 0,
    }  # fmt: skip
    assert restored.open_ids() == {"g2": 2}


def test_a_ledger_that_does_not_balance_is_refused() -> None:
    state = Ledger().to_state()
    with pytest.raises(LedgerError, match="issued 4"):
        Ledger.from_state(state | {"cursor": 4})


def test_an_open_id_cannot_be_issued_again() -> None:
    ledger = Ledger()
    ledger.issue("g")
    with pytest.raises(LedgerError, match="open already"):
        ledger.issue("g")
