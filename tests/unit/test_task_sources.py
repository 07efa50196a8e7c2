"""Task sources: what is read, in which order, and what is refused."""

from __future__ import annotations

import builtins
import json
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.chat import ChatTokenizer
from broker.errors import ConfigError, ModelError, TaskSourceError, UserCodeError
from broker.runspec import TasksSection
from learner.tasks import TaskSource, check_lengths, load_tasks, order

EXAMPLES = Path(__file__).parents[2] / "examples"


def jsonl(tmp_path: Path, *lines: str, needs_prompt: bool = True, **section: Any) -> TaskSource:
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    return load_tasks(TasksSection(source="tasks.jsonl", **section), [tmp_path], needs_prompt=needs_prompt)


def from_class(tmp_path: Path, body: str, **section: Any) -> TaskSource:
    (tmp_path / "code.py").write_text(body)
    return load_tasks(TasksSection(source="code.py:Tasks", **section), [tmp_path])


def test_a_jsonl_file_gives_its_lines_by_index(tmp_path: Path) -> None:
    source = jsonl(tmp_path, '{"prompt": "é", "answer": 1}', "", '{"prompt": [{"role": "user", "content": "b"}]}')
    assert source.length == 2
    assert source.row(1) == {"prompt": [{"role": "user", "content": "b"}]}
    assert source.row(0) == {"prompt": "é", "answer": 1}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (['{"prompt": "a"}', "", "{oops"], r"tasks\.jsonl, line 3: not JSON"),
        (['{"prompt": "a"}', "[1, 2]"], "line 2: expected a JSON object"),
        (['{"prompt": "a"}', '{"question": "b", "answer": 1}'], "line 2: no column 'prompt'; it has question, answer"),
        (['{"prompt": 3}'], "line 1: expected column 'prompt' to be a string or a list of messages"),
        (['{"prompt": ["a"]}'], "line 1: expected column 'prompt' to be a string or a list of messages"),
        (['{"prompt": ""}'], "line 1: column 'prompt' is empty"),
        ([""], "holds no task"),
        (["", "  ", ""], "holds no task"),
    ],
)
def test_a_line_that_is_no_task_is_named_by_its_number(tmp_path: Path, lines: list[str], told: str) -> None:
    with pytest.raises(TaskSourceError, match=told):
        jsonl(tmp_path, *lines)


def test_the_prompt_column_can_have_another_name_or_come_from_the_environment(tmp_path: Path) -> None:
    assert jsonl(tmp_path, '{"question": "b"}', prompt_column="question").row(0) == {"question": "b"}
    assert jsonl(tmp_path, '{"secret": 3}', needs_prompt=False).row(0) == {"secret": 3}


def test_a_source_that_is_not_there_names_the_places_looked_at(tmp_path: Path) -> None:
    with pytest.raises(TaskSourceError, match=f"does not exist; looked for {tmp_path}/absent.jsonl"):
        load_tasks(TasksSection(source="absent.jsonl"), [tmp_path])
    (tmp_path / "tasks.csv").write_text("prompt\n")
    with pytest.raises(TaskSourceError, match=r"expected a \.jsonl file"):
        load_tasks(TasksSection(source="tasks.csv"), [tmp_path])


def test_a_class_is_made_with_its_arguments_and_may_have_no_end(tmp_path: Path) -> None:
    body = (
        "class Tasks:\n    def __init__(self, base=0): self.base = base\n"
        "    def __getitem__(self, index): return {'prompt': str(self.base + index)}\n"
    )
    endless = from_class(tmp_path, body, arguments={"base": 5})
    assert endless.length is None
    assert endless.row(1_000_000) == {"prompt": "1000005"}
    finite = from_class(tmp_path, body + "    def __len__(self): return 3\n")
    assert finite.length == 3


@pytest.mark.parametrize(
    ("body", "arguments", "error", "told"),
    [
        ("def Tasks(): yield {'prompt': 'a'}", {}, UserCodeError, "has no __getitem__.*turned into a list"),
        ("class Tasks: ...", {}, UserCodeError, r"Write `def __getitem__\(self, index\)"),
        ("Tasks = []", {}, TaskSourceError, "its length is 0"),
        ("Tasks = [{'prompt': 'a'}]", {"x": 1}, ConfigError, "takes no arguments"),
        ("class Tasks: ...", {"x": 1}, UserCodeError, r"could not be made with the arguments \{'x': 1\}"),
        ("Tasks = [{'question': 'a'}]", {}, TaskSourceError, "task 0: no column 'prompt'; it has question"),
        ("Tasks = ['a']", {}, TaskSourceError, "task 0: expected an object with columns, got str"),
        ("class Tasks:\n    def __getitem__(self, i): return 1 / i", {}, TaskSourceError, "task 0 raised ZeroDivision"),
        (
            "Tasks = [{'prompt': 'a', 'image': object()}]",
            {},
            TaskSourceError,
            "column 'image': object .*drop the column",
        ),
        ("Tasks = [{'prompt': 'a', 'huge': 2**70}]", {}, TaskSourceError, "column 'huge': int"),
    ],
)
def test_a_class_that_is_no_source_is_refused_with_what_to_write(
    tmp_path: Path, body: str, arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        from_class(tmp_path, body, arguments=arguments)


def test_rows_become_plain_data(tmp_path: Path) -> None:
    body = (
        "import numpy as np\nfrom datetime import date, datetime\n"
        "Tasks = [{'prompt': np.str_('a'), 'number': np.int64(3), 'half': np.float32(0.5), 'list': np.arange(2),\n"
        "  'nested': {'t': (np.bool_(True), None)}, 'day': date(2024, 1, 2), 'time': datetime(2024, 1, 2, 3)}]\n"
    )
    row = from_class(tmp_path, body).row(0)
    assert row == {
        "prompt": "a",
        "number": 3,
        "half": 0.5,
        "list": [0, 1],
        "nested": {"t": [True, None]},
        "day": date(2024, 1, 2).isoformat(),
        "time": datetime(2024, 1, 2, 3).isoformat(),
    }
    assert not any(isinstance(value, np.generic) for value in row.values())


def test_dataset_directories_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "several"))
    (tmp_path / "files").mkdir()
    rows.to_parquet(str(tmp_path / "files" / "train.parquet"))

    def load(name: str, **section: Any) -> TaskSource:
        return load_tasks(TasksSection(source=name, **section), [tmp_path])

    for name in ("one", "several", "files"):
        source = load(name)
        assert source.length == 2
        assert source.row(1) == {"prompt": "b", "answer": 2}
    assert load("several", split="test").length == 1
    with pytest.raises(TaskSourceError, match="no split 'dev'; it has train, test"):
        load("several", split="dev")
    with pytest.raises(TaskSourceError, match="no column 'question'; it has prompt, answer"):
        load("one", prompt_column="question")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskSourceError, match="no dataset that the `datasets` library can read"):
        load("empty")


def test_a_dataset_directory_without_the_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_datasets(name: str, *rest: Any, **more: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(TaskSourceError, match=r"pip install 'farflung\[datasets\]'"):
        load_tasks(TasksSection(source=str(tmp_path)))


@given(length=st.integers(1, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_each_epoch_visits_every_task_once(length: int, seed: int, epoch: int) -> None:
    places = [order(epoch * length + place, length, seed, shuffle=True) for place in range(length)]
    assert sorted(places) == list(range(length))


def test_the_order_is_the_same_on_every_machine_and_differs_by_epoch_and_seed() -> None:
    first = [order(index, 10, 0, shuffle=True) for index in range(10)]
    assert first == [order(index, 10, 0, shuffle=True) for index in range(10)]
    assert first != [order(10 + index, 10, 0, shuffle=True) for index in range(10)]
    assert first != [order(index, 10, 1, shuffle=True) for index in range(10)]
    assert first == PINNED, "a resumed run would read other tasks"
    assert order(0, 10**9, 0, shuffle=True) < 10**9


PINNED = [6, 7, 2, 3, 9, 8, 4, 5, 0, 1]


def test_the_order_spreads_tasks_evenly() -> None:
    counts = np.zeros((8, 8), dtype=int)
    for epoch in range(2000):
        for place in range(8):
            counts[place, order(epoch * 8 + place, 8, 3, shuffle=True)] += 1
    assert abs(counts - 250).max() < 6 * np.sqrt(250), "each task is equally likely in each place"


def test_an_unshuffled_or_endless_source_is_read_straight_on() -> None:
    assert [order(index, 3, 0, shuffle=False) for index in range(5)] == [0, 1, 2, 0, 1]
    assert [order(index, None, 0, shuffle=True) for index in range(3)] == [0, 1, 2]


def test_a_prompt_longer_than_the_context_is_refused_at_the_start(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = ChatTokenizer.from_directory(tiny_model)
    lines = [json.dumps({"prompt": "x" * length}) for length in (10, 31, 32)]
    source = jsonl(tmp_path, *lines)
    check_lengths(source, tokenizer, context=32, sample=2)
    with pytest.raises(TaskSourceError, match="task 2: the prompt has 32 tokens, but the model's context is 32"):
        check_lengths(source, tokenizer, context=32, sample=100)
    with pytest.raises(TaskSourceError, match="system_prompt"):
        check_lengths(source, tokenizer, context=32, sample=1, system_prompt="Be brief.")


def test_messages_for_a_model_without_a_chat_template_are_refused_at_the_start(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text((tiny_model / "tokenizer.json").read_text())
    tokenizer = ChatTokenizer.from_directory(tmp_path)
    with pytest.raises(ModelError, match="no chat template"):
        check_lengths(jsonl(tmp_path, '{"prompt": [{"role": "user", "content": "x"}]}'), tokenizer, 32, 1)


def test_the_examples_sources_load() -> None:
    addition = load_tasks(TasksSection(source="addition.py:Tasks"), [EXAMPLES])
    assert addition.length == 1600
    assert addition.row(41)["answer"] == 11 + 11
    assert addition.row(41)["prompt"][0]["content"] == "What is 11 + 11? Answer with just the number."
    guess = load_tasks(
        TasksSection(source="guess_the_number.py:Tasks", arguments={"high": 9}), [EXAMPLES], needs_prompt=False
    )
    assert guess.length is None
    assert {guess.row(index)["secret"] for index in range(100)} == set(range(1, 10))
