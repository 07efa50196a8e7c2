"""The token rules over several turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.conversation import Conversation
from broker.chat import ChatTokenizer
from broker.trajectories import NO_VERSION
from tests.tiny import CHATML, EOS

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("message['content']", "message['content']|trim")
OPENING_THOUGHT = CHATML.replace("assistant\\n'", "assistant\\n<think>'")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_directory(tiny_model)


def templated(tokenizer: ChatTokenizer, template: str) -> ChatTokenizer:
    return ChatTokenizer(
        tokenizer._backend, template=template, special={"eos_token": "<|im_end|>"}, eos_ids=[EOS], source="a test"
    )


def say(conversation: Conversation, ids: list[int], version: int = 0) -> str:
    return conversation.add_reply(ids, np.linspace(-1, -2, len(ids)), version)


def guess_a_number(tokenizer: ChatTokenizer) -> None:
    """Three guesses; every prompt must be the one before, the reply, and the environment's words."""
    conversation = Conversation(tokenizer, [user("Guess a number from 1 to 20.")])
    closing = tokenizer.eos_ids[0]
    sampled: list[int] = []
    for turn, (reply, answer) in enumerate([("10", "Higher."), (" 15 ", "Lower."), ("12", "Yes.")]):
        before = conversation.prompt
        ids = [*tokenizer.encode(reply), closing]
        assert say(conversation, ids, version=turn) == reply
        sampled += ids
        conversation.extend([user(answer)])
        after = conversation.prompt
        assert after[: len(before)].tolist() == before.tolist()
        assert after[len(before) : len(before) + len(ids)].tolist() == ids
        between = tokenizer.decode(after[len(before) + len(ids) :], skip_special=False)
        assert between == f"\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"
    assert (conversation.extensions, conversation.forks) == (3, 0)
    (row,) = conversation.rows()
    row.check()
    assert row.ids[row.trained].tolist() == sampled
    assert row.served_by[row.trained].tolist() == [0] * 3 + [1] * (len(sampled) - 6) + [2] * 3
    assert set(row.served_by[~row.trained].tolist()) == {NO_VERSION}
    assert [turn.role for turn in conversation.turns] == ["user", "assistant"] * 3 + ["user"]


def test_many_turns_are_one_row_that_only_grows(tiny: ChatTokenizer) -> None:
    conversation = Conversation(tiny, [user("Guess.")])
    closing = tiny.eos_ids[0]
    for number in range(4):
        before = conversation.prompt.tolist()
        ids = [*tiny.encode(str(number)), closing]
        say(conversation, ids)
        conversation.extend([user("Higher.")])
        assert conversation.prompt.tolist()[: len(before) + len(ids)] == before + ids
    real = tiny.render([user("Guess."), *conversation.completion])
    assert conversation.prompt.tolist() == tiny.encode(real), "with whole tokens the prompt is the full rendering"
    assert (conversation.extensions, conversation.forks, len(conversation.rows())) == (4, 0, 1)


@pytest.mark.slow
def test_guessing_a_number_keeps_the_token_rules_with_a_real_tokenizer() -> None:
    from broker.models import PACKAGED, resolve

    guess_a_number(ChatTokenizer.from_directory(resolve(PACKAGED).directory))


def test_tokens_that_text_would_not_give_back_are_kept(tiny: ChatTokenizer) -> None:
    conversation = Conversation(tiny, [user("x")])
    broken = [*tiny.encode("é")[:1], 1, EOS]  # half a letter, and a special token in the middle
    say(conversation, broken)
    conversation.extend([user("y")])
    (row,) = conversation.rows()
    assert conversation.forks == 0
    assert row.ids[row.trained].tolist() == broken


def test_a_reply_cut_by_length_is_closed_by_an_untrained_token(tiny: ChatTokenizer) -> None:
    conversation = Conversation(tiny, [user("x")])
    say(conversation, tiny.encode("long"))
    conversation.extend([user("y")])
    say(conversation, [*tiny.encode("z"), EOS])
    (row,) = conversation.rows()
    after_cut = row.prompt_length + len("long")
    assert row.ids[after_cut] == EOS
    assert not row.trained[after_cut]
    assert np.count_nonzero(row.ids[row.trained] == EOS) == 1


def test_another_end_token_than_the_templates_does_not_stand_in_for_it(tiny: ChatTokenizer) -> None:
    tokenizer = ChatTokenizer(tiny._backend, template=CHATML, special={}, eos_ids=[0, EOS], source="a test")
    conversation = Conversation(tokenizer, [user("x")])
    say(conversation, [*tiny.encode("a"), 0])
    conversation.extend([user("y")])
    text = tokenizer.decode(conversation.prompt, skip_special=False)
    assert "a<|endoftext|><|im_end|>\n<|im_start|>user\ny" in text


def test_stripped_thinking_forks_and_trains_each_token_once(tiny: ChatTokenizer) -> None:
    tokenizer = templated(tiny, THINKING)
    conversation = Conversation(tokenizer, [user("x")])
    first = [*tiny.encode("hm</think>7"), EOS]
    say(conversation, first)
    conversation.extend([user("y")])
    assert (conversation.extensions, conversation.forks) == (0, 1)
    assert "hm" not in tokenizer.decode(conversation.prompt)
    second = [*tiny.encode("8"), EOS]
    say(conversation, second)
    conversation.extend([user("z")])
    assert (conversation.extensions, conversation.forks) == (1, 1), "nothing was stripped the second time"
    one, two = conversation.rows()
    assert one.ids[one.trained].tolist() == first
    assert two.ids[two.trained].tolist() == second
    assert two.ids[: two.prompt_length].tolist() == tokenizer.encode(
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\ny<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_generation_prompt_that_the_history_lacks_forks(tiny: ChatTokenizer) -> None:
    conversation = Conversation(templated(tiny, OPENING_THOUGHT), [user("x")])
    say(conversation, [*tiny.encode("a"), EOS])
    conversation.extend([user("y")])
    assert conversation.forks == 1


def test_trimmed_outer_whitespace_is_no_reason_to_fork(tiny: ChatTokenizer) -> None:
    conversation = Conversation(templated(tiny, TRIMMING), [user("x")])
    say(conversation, [*tiny.encode(" a\n"), EOS])
    conversation.extend([user("y")])
    assert (conversation.extensions, conversation.forks) == (1, 0)


def test_a_rewritten_history_forks_and_the_new_row_extends_again(tiny: ChatTokenizer) -> None:
    conversation = Conversation(tiny, [user("x")])
    say(conversation, [*tiny.encode("a"), EOS], version=3)
    conversation.rewrite([user("summary: you said a"), user("go on")])
    say(conversation, [*tiny.encode("b"), EOS], version=4)
    conversation.extend([user("and?")])
    say(conversation, [*tiny.encode("c"), EOS], version=4)
    assert (conversation.extensions, conversation.forks) == (1, 1)
    one, two = conversation.rows()
    assert tiny.decode(one.ids[one.trained]) == "a"
    assert tiny.decode(two.ids[two.trained]) == "bc"
    assert two.served_by[two.trained].tolist() == [4] * 4


def test_a_message_that_looks_like_a_sentinel_confuses_nothing(tiny: ChatTokenizer) -> None:
    conversation = Conversation(tiny, [user("reply0n0end reply1n0end")])
    say(conversation, [*tiny.encode("reply2n0end"), EOS])
    conversation.extend([user("reply3n0end")])
    assert (conversation.extensions, conversation.forks) == (1, 0)


def test_a_string_prompt_is_completed_as_it_is_and_has_one_turn(tiny: ChatTokenizer) -> None:
    conversation = Conversation(tiny, "Once upon")
    assert conversation.prompt.tolist() == tiny.encode("Once upon")
    assert say(conversation, tiny.encode(" a time")) == " a time"
    (row,) = conversation.rows()
    row.check()
    with pytest.raises(ValueError, match="one turn"):
        conversation.extend([user("more")])


def test_an_empty_prompt_and_unequal_logprobs_are_refused(tiny: ChatTokenizer) -> None:
    with pytest.raises(ValueError, match="empty"):
        Conversation(tiny, "")
    with pytest.raises(ValueError, match="one logprob per sampled token"):
        Conversation(tiny, "x").add_reply([3, 4], [-1.0], 0)


WORDS = st.text(alphabet="ab <>/\n`é你", max_size=8)
TURN = st.fixed_dictionaries(
    {
        "ids": st.lists(st.integers(0, 258), min_size=1, max_size=6),
        "stop": st.booleans(),
        "answers": st.lists(WORDS, min_size=1, max_size=2),
        "rewrite": st.integers(0, 5).map(lambda n: n == 0),
    }
)


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(TURN, min_size=1, max_size=5), template=st.sampled_from([CHATML, THINKING, TRIMMING]))
def test_each_sampled_token_is_trained_exactly_once_in_order(
    tiny: ChatTokenizer, turns: list[dict[str, Any]], template: str
) -> None:
    conversation = Conversation(templated(tiny, template), [user("begin")])
    sampled: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for number, turn in enumerate(turns):
        before = conversation.prompt.tolist()
        ids = turn["ids"] + [EOS] * turn["stop"]
        values = [-(len(logprobs) + place + 1) / 8 for place in range(len(ids))]
        conversation.add_reply(ids, values, number)
        sampled, logprobs, versions = sampled + ids, logprobs + values, versions + [number] * len(ids)
        extensions = conversation.extensions
        messages = [user(text) for text in turn["answers"]]
        conversation.rewrite(messages) if turn["rewrite"] else conversation.extend(messages)
        if conversation.extensions > extensions:
            assert conversation.prompt.tolist()[: len(before) + len(ids)] == before + ids
    rows = conversation.rows()
    for row in rows:
        row.check()
        assert not row.behaviour[~row.trained].any()
    assert [int(token) for row in rows for token in row.ids[row.trained]] == sampled
    assert [float(value) for row in rows for value in row.behaviour[row.trained]] == logprobs
    assert [int(version) for row in rows for version in row.served_by[row.trained]] == versions
    assert conversation.sampled_tokens == len(sampled)
    assert conversation.extensions + conversation.forks == len(turns)
