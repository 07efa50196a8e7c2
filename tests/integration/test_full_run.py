"""Whole runs through the command line, every component a process of its own, with a tiny random model.

Most tests look at one run that went to its end undisturbed.
"""

from __future__ import annotations

import itertools
import json
import stat
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from broker.chat import ChatTokenizer
from broker.trajectories import NO_VERSION, Group
from tests.command_line import Ended, Home, made_step, read_steps, to_toml

pytestmark = pytest.mark.servers

STEPS = 24

REWARD = '''
def low_letters(completions, **columns):
    """The share of the model's letters that stand early in the alphabet: a step in any direction shows."""
    scores = []
    for completion in completions:
        text = "".join(message["content"] for message in completion if message["role"] == "assistant")
        scores.append(sum(letter in "abcdefghijklm" for letter in text) / max(1, len(text)))
    return scores
'''

TASKS = "".join(json.dumps({"prompt": [{"role": "user", "content": f"say {n}"}]}) + "\n" for n in range(20))

EXAMPLES = Path(__file__).parents[2] / "examples"

CLOSED = ("trained", "dropped", "skipped", "failed", "expired")


@dataclass(frozen=True)
class Span:
    """A span as a trace file tells it."""

    name: str
    trace: str
    id: str
    parent: str
    component: str
    links: list[str]
    """The trace ids that it links to."""
    attributes: dict[str, Any]


@dataclass
class Run:
    """A run and what its command said when it ended."""

    home: Home
    config: Path
    directory: Path
    ended: Ended
    spans: list[Span] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        return dict(self.ended.json)

    def ask(self, *arguments: object) -> Any:
        """What a querying command prints as JSON about this run."""
        ended = self.home.farflung(*arguments, "--dir", self.directory, "--json")
        assert ended.code == 0, ended.err
        return ended.json

    def stored_groups(self) -> list[Group]:
        """Every group in the run's store, by index."""
        objects = self.directory / "servers" / "objects" / "farflung" / "runs" / self.config.stem
        blobs = [path for path in objects.glob("*/groups/*") if path.is_file()]
        return sorted((Group.from_blob(path.read_bytes()) for path in blobs), key=lambda group: group.index)


def new_home(directory: Path) -> Home:
    home = Home(directory)
    home.write("reward.py", REWARD)
    home.write("tasks.jsonl", TASKS)
    return home


def read_spans(run_directory: Path) -> list[Span]:
    """Every span in the trace files (OTLP as JSON lines) of a run's directory."""
    found = []
    for path in (run_directory / "telemetry").glob("traces-*.jsonl"):
        for line in path.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                component = _attributes(resource["resource"])["service.name"].removeprefix("farflung-")
                found += [
                    Span(
                        name=span["name"],
                        trace=span["traceId"],
                        id=span["spanId"],
                        parent=span.get("parentSpanId", ""),
                        component=component,
                        links=[link["traceId"] for link in span.get("links", [])],
                        attributes=_attributes(span),
                    )
                    for scope in resource["scopeSpans"]
                    for span in scope["spans"]
                ]
    return found


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: next(iter(item["value"].values())) for item in holder.get("attributes", [])}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Run]:
    """A run that went to its end."""
    home = new_home(tmp_path_factory.mktemp("full"))
    config = home.write_run("tiny", tiny_model, run={"steps": STEPS}, fleet={"actors": 2})
    ended = home.farflung("up", config, "--json")
    assert ended.code == 0, ended.err
    directory = home.directory / "runs" / "tiny"
    yield Run(home, config, directory, ended, read_spans(directory))
    home.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = new_home(tmp_path)
    yield home
    home.close()


def assert_balanced(groups: dict[str, Any]) -> None:
    closed = sum(groups[name] for name in CLOSED)
    assert groups["issued"] == closed + groups["open"], groups


def groups_of(summary: dict[str, Any]) -> dict[str, int]:
    return {name.removeprefix("groups_"): value for name, value in summary.items() if name.startswith("groups_")}


# ----------------------------------------------------------------------------------------------------- the finished run


def test_a_finished_run_ends_its_output_with_one_json_object(run: Run) -> None:
    expected = {"run", "steps", "reward_first5", "reward_last5", "head", "adapter_key", "seconds"}
    expected |= {f"groups_{name}" for name in ("issued", *CLOSED)}
    assert run.summary.keys() >= expected
    assert run.summary["run"] == "tiny"
    assert run.summary["steps"] == STEPS
    assert run.ended.out.count("\n") == 1, "with --json, nothing but the object goes to standard output"


def test_training_raises_the_reward(run: Run) -> None:
    assert run.summary["reward_last5"] > run.summary["reward_first5"] + 0.05


def test_every_issued_group_is_accounted_for(run: Run) -> None:
    groups = groups_of(run.summary)
    assert_balanced(groups)
    assert groups["open"] == 0
    assert groups["trained"] + groups["skipped"] == STEPS * 4, "each step is made of groups_per_step groups"
    for step in read_steps(run.directory):
        assert_balanced(step)


def test_every_step_publishes_one_version(run: Run) -> None:
    versions = run.ask("adapters", "list", "tiny")
    assert [record["adapter"]["version"] for record in versions] == list(range(1, run.summary["head"] + 1))
    assert run.summary["head"] == STEPS
    assert versions[-1]["adapter"]["key"] == run.summary["adapter_key"]
    assert len({record["adapter"]["sha256"] for record in versions}) == STEPS, "each step changed the weights"


def test_a_run_is_replayed_bit_for_bit(run: Run) -> None:
    replayed = run.ask("runs", "replay", "tiny")
    assert replayed["identical"]
    steps = replayed["steps"]
    assert [(step["step"], step["identical"], step["difference"]) for step in steps] == [
        (number, True, "") for number in range(1, STEPS + 1)
    ]
    versions = run.ask("adapters", "list", "tiny")
    assert [step["adapter"] for step in steps] == [record["adapter"]["sha256"] for record in versions]
    groups = [group for step in steps for group in step["groups"]]
    assert len(groups) == len(set(groups)) == STEPS * 4, "no group is in two steps"


def test_status_and_the_list_of_runs_tell_how_the_run_ended(run: Run) -> None:
    [listed] = run.ask("runs", "list")
    assert (listed["run"], listed["state"], listed["step"], listed["head"], listed["active"]) == (
        "tiny", "finished", STEPS, STEPS, STEPS,
    )  # fmt: skip
    [shown] = run.ask("status", "tiny")["runs"]
    assert shown["run"]["incarnation"] == listed["incarnation"]
    assert shown["ledger"] == groups_of(run.summary)


def test_a_runs_figures_are_drawn_from_its_commits(run: Run) -> None:
    drawn = run.home.farflung("plot", "tiny", "reward", "mfu", "--dir", run.directory)
    assert drawn.code == 0, drawn.err
    assert f"reward, steps 1 to {STEPS}, last" in drawn.out
    assert any("\u2800" <= character <= "\u28ff" for character in drawn.out)
    wrong = run.home.farflung("plot", "tiny", "rewrad", "--dir", run.directory)
    assert wrong.code == 2
    assert "no step logged 'rewrad'" in wrong.err
    listed = run.home.farflung("plot", "tiny", "--json", "--dir", run.directory)
    logged = read_steps(run.directory)
    committed = [json.loads(line) for line in listed.out.splitlines()]
    assert [record["reward"] for record in committed] == [record["reward"] for record in logged]
    assert all(0 < record["mfu"] < 1 for record in committed if record["grad_norm"] > 0)


def test_what_holds_a_password_is_readable_by_its_owner_alone(run: Run) -> None:
    servers = run.directory / "servers"
    current = run.home.directory / "config" / "farflung" / "profile.toml"
    private = [run.directory / "profile.toml", current, *servers.glob("*.json"), servers / "nats.conf"]
    assert {path.name for path in private} == {"profile.toml", "nats.json", "store.json", "nats.conf"}
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in private} == {path.name: 0o600 for path in private}
    passwords = [json.loads(path.read_text())["password"] for path in servers.glob("*.json")]
    readable = [path for path in run.directory.rglob("*") if path.is_file() and path not in private]
    assert readable
    assert not [path for path in readable if any(password.encode() in path.read_bytes() for password in passwords)]


def test_a_pulled_adapter_loads_with_peft_and_a_merged_one_is_the_same_model(run: Run, tiny_model: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for target, options in (("adapter", []), ("merged", ["--merge"])):
        ended = run.home.farflung("adapters", "pull", "tiny", target, *options, "--dir", run.directory)
        assert ended.code == 0, ended.err
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, str(run.home.directory / "adapter"))(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(run.home.directory / "merged", dtype=torch.float32)(ids).logits
    assert (adapted - before).abs().max() > 0.01, "training has changed the model"
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)


def test_stored_trajectories_hold_every_token_with_its_logprob_and_version(run: Run) -> None:
    listed = run.ask("trajectories", "list", "tiny", "--limit", "1000")
    assert STEPS * 4 <= len(listed) <= run.summary["groups_issued"]
    versions = {group["version"] for group in listed}
    assert min(versions) == 0, "the first groups come from the base model"
    assert STEPS - 2 <= max(versions) < STEPS, "the last step's groups are one version old at most"
    for entry in (listed[0], listed[-1]):
        shown = run.ask("trajectories", "show", "tiny", entry["group"])
        version = shown["version"]
        assert version == entry["version"]
        assert shown["adapter"] is None if version == 0 else f"v{version:06d}" in shown["adapter"]
        assert [episode["reward"] for episode in shown["episodes"]] == entry["rewards"]
        assert len(shown["episodes"]) == 8
        for episode in shown["episodes"]:
            assert [turn["role"] for turn in episode["turns"]] == ["user", "assistant"]
            [row] = episode["rows"]
            assert len({len(values) for values in row.values()}) == 1
            tokens = list(zip(row["trained"], row["logprobs"], row["versions"], strict=True))
            assert 1 <= sum(row["trained"]) <= 8, "at most max_new_tokens were sampled"
            assert all(logprob < 0 and served == version for trained, logprob, served in tokens if trained)
            assert all((logprob, served) == (0, NO_VERSION) for trained, logprob, served in tokens if not trained)


def test_no_token_is_older_than_the_configuration_allows(run: Run) -> None:
    assert max(step["staleness_max"] for step in read_steps(run.directory)) <= 1


def test_the_same_command_on_a_finished_run_says_so_and_starts_nothing(run: Run) -> None:
    before = {path: path.stat().st_size for path in (run.directory / "logs").glob("*-*.log")}
    assert before
    again = run.home.farflung("up", run.config, "--json")
    assert again.code == 0, again.err
    assert "run tiny is finished" in again.err
    assert again.json == run.summary
    assert {path: path.stat().st_size for path in (run.directory / "logs").glob("*-*.log")} == before


# --------------------------------------------------------------------------------------------------------------- traces


def used_in_steps(run: Run) -> list[Span]:
    """The root spans of the groups that steps were made of; a group may also be dropped as too old."""
    groups = [span for span in run.spans if span.name == "group"]
    return [span for span in groups if span.attributes["farflung.outcome"] in ("trained", "skipped")]


def test_one_trace_follows_a_group_through_every_process(run: Run) -> None:
    by_id = {span.id: span for span in run.spans}
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in run.spans:
        traces[span.trace].append(span)
    assert sum(span.name == "group" for span in run.spans) == run.summary["groups_issued"]
    groups = used_in_steps(run)
    assert len(groups) == STEPS * 4
    for group in groups:
        names = Counter(span.name for span in traces[group.trace])
        assert (names["group"], names["actor"], names["store"], names["reward"]) == (1, 1, 1, 1)
        assert names["episode"] == names["generate"] == 8
        for name in ("generate", "route", "engine"):
            # Where the machine stood still for seconds a request was placed again, and has a span more.
            asked = {span.attributes["farflung.request"] for span in traces[group.trace] if span.name == name}
            assert len(asked) == 8 <= names[name]
    engines = [span for span in run.spans if span.name == "engine" and span.trace in {group.trace for group in groups}]
    for engine in engines:
        path = [engine]
        while path[-1].parent:
            path.append(by_id[path[-1].parent])
        assert [(span.name, span.component) for span in path] == [
            ("engine", "actor"),
            ("route", "router"),
            ("generate", "actor"),
            ("episode", "actor"),
            ("actor", "actor"),
            ("group", "learner"),
        ]


def test_each_step_links_to_the_groups_it_trained_on(run: Run) -> None:
    steps = [span for span in run.spans if span.name == "step"]
    assert len(steps) == STEPS
    linked = Counter(trace for step in steps for trace in step.links)
    assert linked == Counter(span.trace for span in used_in_steps(run))


def test_publishing_loading_and_activating_hang_under_their_step(run: Run) -> None:
    by_id = {span.id: span for span in run.spans}
    steps = {int(span.attributes["farflung.step"]): span for span in run.spans if span.name == "step"}
    last = steps[STEPS]
    below = [span for span in run.spans if span.trace == last.trace]
    assert {span.name for span in below} == {"step", "train", "publish", "load", "activate"}
    loads = [span for span in below if span.name == "load"]
    assert len({span.attributes["farflung.replica"] for span in loads}) == 2
    for span in below:
        root = span
        while root.parent:
            root = by_id[root.parent]
        assert root is last


# ------------------------------------------------------------------------------------------ interrupted, and begun anew


def test_an_interrupted_run_leaves_no_process_and_goes_on_where_it_stopped(home: Home, tiny_model: Path) -> None:
    config = home.write_run("halted", tiny_model, run={"steps": 5000}, fleet={"actors": 2})
    directory = home.directory / "runs" / "halted"
    first = home.start("up", config, "--json")
    first.until(lambda: made_step(directory, 3), "step 3")
    children = first.descendants()
    assert len(children) == 6, "two servers, two actors, a router and a learner"
    first.interrupt()
    ended = first.wait()
    assert ended.code == 130
    assert "goes on from here" in ended.err
    assert psutil.wait_procs(children, timeout=1)[1] == []
    assert ended.out == "", "no summary of a run that is not over"

    before = read_steps(directory)
    target = before[-1]["step"] + 12
    config = home.write_run("halted", tiny_model, run={"steps": target}, fleet={"actors": 2})
    again = home.farflung("up", config, "--json")
    assert again.code == 0, again.err
    steps = read_steps(directory)
    assert steps[: len(before)] == before
    # A step whose commit was made just as the signal came may be missing from the log; none is made twice.
    assert steps[len(before)]["step"] in (before[-1]["step"] + 1, before[-1]["step"] + 2)
    for earlier, later in itertools.pairwise(steps):
        assert later["step"] > earlier["step"]
        assert later["head"] > earlier["head"]
        assert later["issued"] >= earlier["issued"]
        assert_balanced(later)
    groups = groups_of(again.json)
    assert again.json["steps"] == again.json["head"] == target
    assert_balanced(groups)
    assert groups["open"] == 0
    assert groups["trained"] + groups["skipped"] == target * 4

    anew = home.farflung("up", home.write_run("halted", tiny_model, run={"steps": 2}), "--restart", "--json")
    assert anew.code == 0, anew.err
    assert anew.json["steps"] == anew.json["head"] == 2
    assert anew.json["groups_issued"] == 2 * 4
    assert anew.json["adapter_key"].split("/")[2] != again.json["adapter_key"].split("/")[2], "another incarnation"
    old = directory / "servers" / "objects" / "farflung" / again.json["adapter_key"]
    assert old.is_file(), "the old incarnation stays in the store"


# ----------------------------------------------------------------------------------------------------------- many turns


def test_many_turns_keep_their_tokens_and_only_the_models_are_trained(home: Home, tiny_model: Path) -> None:
    plain = tomllib.loads((EXAMPLES / "guess_the_number.toml").read_text())
    plain["run"] |= {"name": "guess", "model": str(tiny_model), "steps": 3}
    plain["environment"] |= {"arguments": {"turns": 3}, "rewards": ["reward.py:low_letters"]}
    plain["algorithm"] |= {"group_size": 4, "groups_per_step": 2}
    home.write("guess_the_number.py", (EXAMPLES / "guess_the_number.py").read_text())
    config = home.write("guess.toml", to_toml(plain))
    ended = home.farflung("up", config, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["groups_trained"] > 0
    guess = Run(home, config, home.directory / "runs" / "guess", ended)
    tokenizer = ChatTokenizer.from_directory(tiny_model)
    spans = read_spans(guess.directory)
    traces = {span.attributes["farflung.group"]: span.trace for span in spans if span.name == "group"}
    sampled = Counter[str]()
    for span in spans:
        if span.name == "engine":
            sampled[span.trace] += int(span.attributes["farflung.tokens"])
    groups = guess.stored_groups()
    assert len(groups) >= 6
    for group in groups:
        trained = sum(int(row.trained.sum()) for episode in group.episodes for row in episode.rows)
        assert trained == sampled[traces[group.group]], "each token that an engine sampled is trained on once"
    episodes = list(itertools.chain.from_iterable(group.episodes for group in groups))
    assert max(episode.extensions for episode in episodes) == 2, "three turns"
    for episode in episodes:
        [row] = episode.rows
        given = [turn.content for turn in episode.turns if turn.role == "user"]
        replies = [turn.content for turn in episode.turns if turn.role == "assistant"]
        assert len(given) == len(replies) == episode.extensions + 1
        assert episode.forks == 0
        segments = np.split(np.arange(len(row)), np.flatnonzero(np.diff(row.trained.astype(int))) + 1)
        assert len(segments) == 2 * len(replies), "what the environment said and what the model said, in turn"
        for said, message in zip(segments[::2], given, strict=True):
            assert message in tokenizer.decode(row.ids[said])
            assert not row.trained[said].any()
            assert (row.served_by[said] == NO_VERSION).all()
        for reply in segments[1::2]:
            assert 1 <= len(reply) <= 8, "at most max_new_tokens"
            assert (row.behaviour[reply] < 0).all()
