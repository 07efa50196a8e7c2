"""Whatever a run has lost - broker, objects, directory, machine - its next learner goes on from what is left."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from broker.trajectories import Group
from deploy.servers import Server, nats_launch, store_launch
from tests.command_line import Command, Ended, Home, made_step, read_steps

pytestmark = pytest.mark.servers

TASKS = "".join(json.dumps({"prompt": [{"role": "user", "content": f"say {n}"}]}) + "\n" for n in range(20))

REWARD = """
def low_letters(completions, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter in "abcdefghijklm" for letter in text) / max(1, len(text)) for text in texts]
"""

CLOSED = ("trained", "dropped", "skipped", "failed", "expired")

OTHER_MACHINE = ("unshare", "--uts", "sh", "-c", 'hostname another-machine && exec "$@"', "sh")
"""Runs a command under another host name: what a process id means there, nobody here can tell."""


def new_home(directory: Path, wrapper: tuple[str, ...] = ()) -> Home:
    home = Home(directory, wrapper)
    home.write("reward.py", REWARD)
    home.write("tasks.jsonl", TASKS)
    return home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = new_home(tmp_path / "home")
    yield home
    home.close()


@dataclass
class Services:
    """A broker and a store of their own, that a test may wipe."""

    directory: Path
    broker: Server
    store: Server

    @property
    def options(self) -> tuple[str, ...]:
        return ("--nats", self.broker.launch.url, "--s3", self.store.launch.url)

    def wipe_broker(self) -> None:
        """The broker's machine is lost, and another takes its place under the same address."""
        self.broker.kill()
        shutil.rmtree(self.directory / "jetstream")
        self.broker.start()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    directory = tmp_path / "services"
    servers = [Server(make(directory), directory / "log") for make in (nats_launch, store_launch)]
    for server in servers:
        server.start()
    yield Services(directory, *servers)
    for server in servers:
        server.stop()


def assert_balanced(groups: dict[str, Any], prefix: str = "groups_") -> None:
    closed = sum(groups[f"{prefix}{name}"] for name in CLOSED)
    assert groups[f"{prefix}issued"] == closed + groups[f"{prefix}open"], groups


def stopped_after(home: Home, config: Path, step: int) -> list[dict[str, Any]]:
    """`farflung up`, interrupted once `step` is made; what it logged of its steps."""
    directory = home.directory / "runs" / config.stem
    up = home.start("up", config, "--json")
    up.until(lambda: made_step(directory, step), f"step {step}")
    up.interrupt()
    ended = up.wait()
    assert ended.code == 130, ended.err
    return read_steps(directory)


def ask(home: Home, directory: Path, *arguments: object) -> Any:
    ended = home.farflung(*arguments, "--dir", directory, "--json")
    assert ended.code == 0, ended.err
    return ended.json


def assert_refused(ended: Ended, code: int, *said: str) -> None:
    assert ended.code == code, f"{ended.out}\n{ended.err}"
    line = ended.err.strip().splitlines()[-1]
    for words in said:
        assert words in line
    assert "Traceback" not in ended.err


# ------------------------------------------------------------------------------------------- the broker's data are gone


def test_a_stopped_run_whose_broker_was_wiped_goes_on_and_one_whose_store_was_wiped_is_refused(
    home: Home, tiny_model: Path
) -> None:
    config = home.write_run("wiped", tiny_model, run={"steps": 5000})
    directory = home.directory / "runs" / "wiped"
    before = stopped_after(home, config, 4)
    target = before[-1]["step"] + 6
    config = home.write_run("wiped", tiny_model, run={"steps": target})
    incarnations = sorted((directory / "servers/objects/farflung/runs/wiped").iterdir())
    shutil.rmtree(directory / "servers" / "jetstream")
    again = home.farflung("up", config, "--json")
    assert again.code == 0, again.err
    assert "note: the broker had lost this run; its record was made again from the store" in again.err
    steps = read_steps(directory)
    assert steps[: len(before)] == before
    assert [step["step"] for step in steps] == list(range(1, target + 1))
    assert again.json["steps"] == again.json["head"] == target
    assert_balanced(again.json)
    assert again.json["groups_open"] == 0
    assert again.json["groups_trained"] + again.json["groups_skipped"] == target * 4, "no group is trained on twice"
    assert sorted((directory / "servers/objects/farflung/runs/wiped").iterdir()) == incarnations
    versions = ask(home, directory, "adapters", "list", "wiped")
    assert [record["adapter"]["version"] for record in versions] == list(range(1, target + 1))
    assert all(record["state"] == "committed" and record["checkpoint"] for record in versions)

    shutil.rmtree(directory / "servers/objects/farflung/runs")
    longer = home.write_run("wiped", tiny_model, run={"steps": target + 2})
    refused = home.farflung("up", longer, "--json")
    assert_refused(
        refused, 8, f"run wiped cannot resume: none of its {target} commits is intact", "begin anew with --restart"
    )
    anew = home.farflung("up", home.write_run("wiped", tiny_model, run={"steps": 1}), "--restart", "--json")
    assert anew.code == 0, anew.err
    assert anew.json["steps"] == 1


def test_a_run_goes_on_by_itself_when_its_broker_loses_everything_under_it(
    home: Home, tiny_model: Path, services: Services
) -> None:
    config = home.write_run("robbed", tiny_model, run={"steps": 40})
    directory = home.directory / "runs" / "robbed"
    up = home.start("up", config, "--json", *services.options)
    up.until(lambda: made_step(directory, 3), "step 3")
    services.wipe_broker()
    made = len(read_steps(directory))
    up.until(lambda: len(read_steps(directory)) > made + 3, "steps after the loss")
    ended = up.wait()
    assert ended.code == 0, ended.err
    assert "learner ended (exit code 9), starting it again" in ended.err
    assert "the broker had lost this run" in ended.err
    assert ended.json["steps"] == ended.json["head"] == 40
    assert_balanced(ended.json)
    assert ended.json["groups_trained"] + ended.json["groups_skipped"] == 40 * 4
    numbers = [step["step"] for step in read_steps(directory)]
    assert numbers == sorted(set(numbers)), "no step is made twice"


def test_a_deleted_run_does_not_come_back(home: Home, tiny_model: Path) -> None:
    config = home.write_run("gone", tiny_model, run={"steps": 2})
    directory = home.directory / "runs" / "gone"
    first = home.farflung("up", config, "--json")
    assert first.code == 0, first.err
    deleted = home.farflung("runs", "delete", "gone", "--yes", "--dir", directory)
    assert deleted.code == 0, deleted.err
    objects = directory / "servers/objects/farflung/runs/gone"
    assert [path.name.split("-")[0] for path in objects.rglob("*") if path.is_file()] == ["deleted"]
    shutil.rmtree(directory / "servers" / "jetstream")
    again = home.farflung("up", config, "--json")
    assert again.code == 0, again.err
    assert again.json["steps"] == 2
    assert again.json["adapter_key"].split("/")[2] != first.json["adapter_key"].split("/")[2]
    assert "had lost" not in again.err


# -------------------------------------------------------------------------------------------------- objects are lost


def test_a_run_whose_newest_commits_are_lost_goes_back_says_so_and_ends_well(home: Home, tiny_model: Path) -> None:
    config = home.write_run("holed", tiny_model, run={"steps": 5000})
    directory = home.directory / "runs" / "holed"
    last = stopped_after(home, config, 5)[-1]["step"]
    target = last + 7
    config = home.write_run("holed", tiny_model, run={"steps": target})
    [incarnation] = [
        path for path in (directory / "servers/objects/farflung/runs/holed").iterdir() if path.name != "history"
    ]
    checkpoints = sorted((incarnation / "checkpoints").iterdir())
    shutil.rmtree(checkpoints[-1])  # this commit's state is gone
    for adapter in (incarnation / "adapters").glob(f"{int(checkpoints[-2].name):06d}.*"):
        adapter.write_bytes(adapter.read_bytes()[:-1] + b"?")  # and this one's weights are corrupt
    intact = int(checkpoints[-3].name)
    assert intact >= last - 2
    lost = ask(home, directory, "adapters", "list", "holed")[intact:]
    again = home.farflung("up", config, "--json")
    assert again.code == 0, again.err
    assert "note: the newest 2 step(s) are lost from the store" in again.err
    assert f"it goes on from step {intact}, version {intact}" in again.err
    assert again.json["steps"] == again.json["head"] == target
    assert_balanced(again.json)
    assert again.json["groups_trained"] + again.json["groups_skipped"] == target * 4
    anew = ask(home, directory, "adapters", "list", "holed")
    assert [record["adapter"]["version"] for record in anew] == list(range(1, target + 1))
    assert all(record["state"] == "committed" for record in anew)
    for old, new in zip(lost, anew[intact:], strict=False):
        same = old["adapter"]["sha256"] == new["adapter"]["sha256"]
        assert (old["adapter"]["name"] == new["adapter"]["name"]) == same, "the same name always means the same bytes"


# ------------------------------------------------------------------------------- another machine, without a directory


def test_another_machine_goes_on_with_nothing_but_broker_and_store(
    tmp_path: Path, tiny_model: Path, services: Services
) -> None:
    if subprocess.run([*OTHER_MACHINE, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("changing the host name needs a privilege that is missing here")
    fleet, here, there = (
        new_home(tmp_path / "fleet"), new_home(tmp_path / "here"), new_home(tmp_path / "there", OTHER_MACHINE),
    )  # fmt: skip
    try:
        options = services.options
        config = here.write_run("moved", tiny_model, run={"steps": 5000})
        first = here.start("learner", config, "--dir", "log", "--threads", 1, *options)
        fleet.start("router", "--fleet", "tiny", *options)
        fleet.start("actor", "--model", tiny_model, "--code", fleet.directory, "--threads", 1, *options)
        first.until(lambda: made_step(here.directory / "log", 3), "step 3")
        config = there.write_run("moved", tiny_model, run={"steps": 5000})
        refused = there.farflung("learner", config, "--threads", 1, *options)
        assert_refused(refused, 5, "run moved is held by the learner learner-")
        first.kill()
        target = read_steps(here.directory / "log")[-1]["step"] + 4
        config = there.write_run("moved", tiny_model, run={"steps": target})
        second = resumed(there, config, options)
        steps = read_steps(there.directory / "log")
        assert [step["step"] for step in steps] == list(range(1, target + 1)), "the log is made again from the commits"
        assert second.json["steps"] == second.json["head"] == target
        assert_balanced(second.json)
        assert second.json["groups_trained"] + second.json["groups_skipped"] == target * 4

        config = there.write_run("branch", tiny_model, run={"steps": 2})
        branched = there.farflung("learner", config, "--from", "moved@2", "--dir", "branch", "--threads", 1, *options)
        assert branched.code == 0, branched.err
        assert (branched.json["steps"], branched.json["head"]) == (2, 3), "version 1 is the other run's version 2"
    finally:
        for home in (there, here, fleet):
            home.close()


def resumed(home: Home, config: Path, options: tuple[str, ...]) -> Ended:
    """A learner started again and again until the presence of the one before it has faded; how it ended."""
    for _ in range(20):
        ended = home.farflung("learner", config, "--dir", "log", "--threads", 1, *options)
        if ended.code != 5:
            assert ended.code == 0, ended.err
            return ended
    raise AssertionError(f"refused for ever: {ended.err}")


def test_of_two_learners_started_at_once_one_owns_the_run(tmp_path: Path, tiny_model: Path, services: Services) -> None:
    homes = [new_home(tmp_path / name) for name in ("one", "two")]
    try:
        commands: list[Command] = []
        for home in homes:
            config = home.write_run("fought", tiny_model, run={"steps": 3})
            commands.append(home.start("learner", config, "--threads", 1, *services.options))
        loser = next(iter(wait_for_one(commands)))
        assert_refused(loser.wait(), 5, "run fought", "held by the learner" if "held" in loser.err else "same moment")
        [winner] = [command for command in commands if command is not loser]
        assert winner.running, winner.err
        homes[0].start("router", "--fleet", "tiny", *services.options)
        homes[0].start("actor", "--model", tiny_model, "--code", homes[0].directory, "--threads", 1, *services.options)
        ended = winner.wait()
        assert ended.code == 0, ended.err
        assert ended.json["steps"] == 3
        assert_balanced(ended.json)
    finally:
        for home in homes:
            home.close()


def wait_for_one(commands: list[Command]) -> Iterator[Command]:
    """The command that ends first."""
    commands[0].until(lambda: any(not command.running for command in commands[1:]) or not commands[0].running, "an end")
    yield from (command for command in commands if not command.running)


# ------------------------------------------------------------------------------------------------------------ branches


@pytest.mark.timeout(600)  # three whole runs
def test_a_run_branched_from_a_finished_one_begins_with_its_version_and_never_with_the_base_model(
    home: Home, tiny_model: Path
) -> None:
    origin = home.write_run("origin", tiny_model, run={"steps": 5})
    directory = home.directory / "runs" / "origin"
    first = home.farflung("up", origin, "--json")
    assert first.code == 0, first.err
    config = home.write_run("branch", tiny_model, run={"steps": 4})
    branched = home.farflung("up", config, "--from", "origin@3", "--json")
    assert branched.code == 0, branched.err
    assert (branched.json["steps"], branched.json["head"]) == (4, 5), "version 1 is the origin's version 3"
    assert branched.json["groups_issued"] >= 4 * 4
    assert_balanced(branched.json)
    new = home.directory / "runs" / "branch"
    objects = new / "servers/objects/farflung/runs/branch"
    [first_version] = objects.glob("*/adapters/000001.*")
    [chosen] = (objects.parent / "origin").glob("*/adapters/000003.*")
    assert first_version.name.partition(".")[2] == chosen.name.partition(".")[2], "the very bytes"
    assert len(list(objects.glob("*/adapters/*"))) == 5
    groups = [Group.from_blob(path.read_bytes()) for path in objects.glob("*/groups/*")]
    assert len(groups) >= 16
    assert min(group.version for group in groups) == 1
    assert all(group.adapter is not None for group in groups), "the base model sampled nothing"
    steps = read_steps(new)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[0]["truth_p99"] < 1e-3
    assert [step["step"] for step in read_steps(directory)] == [1, 2, 3, 4, 5], "the origin's log is its own"

    more = home.write_run("branch", tiny_model, run={"steps": 5})
    goes_on = home.farflung("up", more, "--json")
    assert goes_on.code == 0, goes_on.err
    assert (goes_on.json["steps"], goes_on.json["head"]) == (5, 6)

    assert_refused(home.farflung("up", origin, "--from", "origin@x"), 2, "expected RUN, RUN@latest or RUN@VERSION")


# --------------------------------------------------------------------------------------------------------- failed runs


@pytest.mark.timeout(600)  # three whole runs
def test_a_run_that_failed_goes_on_once_it_is_mended_and_its_ledger_is_exact(home: Home, tiny_model: Path) -> None:
    config = home.write_run("broken", tiny_model, run={"steps": 5000})
    directory = home.directory / "runs" / "broken"
    before = stopped_after(home, config, 3)
    home.write("reward.py", "def low_letters(completions, **columns):\n    raise RuntimeError('the judge is ill')\n")
    failed = home.farflung("up", config, "--json")
    assert_refused(failed, 6, "8 groups failed in a row", "the judge is ill", "Mend that and start again")
    [listed] = ask(home, directory, "runs", "list")
    assert listed["state"] == "failed"
    home.write("reward.py", REWARD)
    target = read_steps(directory)[-1]["step"] + 5
    config = home.write_run("broken", tiny_model, run={"steps": target})
    mended = home.farflung("up", config, "--json")
    assert mended.code == 0, mended.err
    assert mended.json["steps"] == target
    assert_balanced(mended.json)
    assert mended.json["groups_trained"] + mended.json["groups_skipped"] == target * 4
    steps = read_steps(directory)
    assert steps[: len(before)] == before
    for earlier, later in itertools.pairwise(steps):
        assert later["step"] > earlier["step"]
        assert later["issued"] >= earlier["issued"]
        assert_balanced(later, "")
