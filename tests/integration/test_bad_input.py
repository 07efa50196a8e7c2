"""What goes wrong is said with the thing's name and the remedy, under an exit code of its own, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest
from nats.js.errors import APIError

from broker import names
from broker.bus import Bus, tasks_config
from broker.errors import ConnectionFailed, StoreError
from broker.messages import DeadLetter, GenerateRequest, Task, decode, pack_ids
from broker.store import Store, StoreAddress
from deploy import profile
from deploy.servers import Server, free_port, nats_launch, store_launch
from tests.command_line import Ended, Home, made_step, read_steps

pytestmark = pytest.mark.servers

TASKS = "".join(json.dumps({"prompt": [{"role": "user", "content": f"say {n}"}]}) + "\n" for n in range(8))

REWARD = """
def low_letters(completions, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter in "abcdefghijklm" for letter in text) / max(1, len(text)) for text in texts]
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    home.write("reward.py", REWARD)
    home.write("tasks.jsonl", TASKS)
    yield home
    home.close()


def assert_refused(ended: Ended, code: int, *said: str) -> None:
    """The command ended with `code` and one line that says all of `said`."""
    assert ended.code == code, f"{ended.out}\n{ended.err}"
    line = ended.err.strip().splitlines()[-1]
    assert line.startswith("farflung"), ended.err
    for words in said:
        assert words in line
    assert "Traceback" not in ended.err


# ------------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm": {"group_sise": 8}}, ["algorithm.group_sise: unknown key", "did you mean group_size?"]),
        ({"run": {"lr": 1e-4}}, ["run.lr: unknown key", "write optimizer.lr"]),
        ({"run": {"steps": "many"}}, ["run.steps: expected `int`, got `str`", "Optimizer steps to make."]),
        ({"sampling": {"temperature": 0.0}}, ["sampling.temperature: expected `float` > 0.0 (0.0)"]),
        (
            {"algorithm": {"min_group_size": 9}},
            ["algorithm.min_group_size: expected at most group_size (8), got 9"],
        ),
        (
            {"environment": {"rewards": []}},
            ["nothing scores an episode", 'Write rewards = ["path/to/file.py:function"]'],
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_key(
    home: Home, tmp_path: Path, changes: dict[str, dict[str, object]], said: list[str]
) -> None:
    config = home.write_run("wrong", tmp_path, **changes)
    assert_refused(home.farflung("config", config), 2, str(config), *said)


def test_a_key_that_is_missing_is_named_with_its_meaning_before_anything_starts(home: Home) -> None:
    config = home.write("wrong.toml", '[run]\nname = "wrong"\n[tasks]\nsource = "tasks.jsonl"\n')
    assert_refused(home.farflung("up", config), 2, "run.model: missing; expected The base model: a directory")
    assert not (home.directory / "runs").exists()


def test_a_file_that_is_missing_or_no_toml_is_refused(home: Home) -> None:
    assert_refused(home.farflung("up", "none.toml"), 2, "none.toml: No such file", "give the path of a TOML file")
    assert_refused(home.farflung("up", home.write("bad.toml", "[run\n")), 2, "bad.toml is not valid TOML")


# --------------------------------------------------------------------------------------------------- model, tasks, code


def test_a_model_directory_that_is_missing_is_refused(home: Home) -> None:
    config = home.write_run("wrong", home.directory / "nowhere")
    ended = home.farflung("up", config)
    assert_refused(ended, 2, "run.model", "nowhere' is no directory on this machine", "Give a directory with")


def test_a_model_that_is_no_causal_language_model_is_refused(home: Home, tiny_model: Path) -> None:
    model = copy_model(tiny_model, home.directory / "encoder")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"architectures": ["BertModel"]}))
    ended = home.farflung("up", home.write_run("wrong", model))
    assert_refused(ended, 2, f"{model} is no causal language model", "['BertModel']", "ends in ForCausalLM")


def copy_model(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


@dataclass(frozen=True)
class Servers:
    """Options by which a command finds the servers of this session."""

    nats: str
    s3: str

    @property
    def options(self) -> list[str]:
        return ["--nats", self.nats, "--s3", self.s3]


@pytest.fixture
def servers(nats_server: Server, store_server: Server) -> Servers:
    return Servers(nats_server.launch.url, store_server.launch.url)


def test_chat_prompts_for_a_model_without_a_chat_template_are_refused(
    home: Home, tiny_model: Path, servers: Servers
) -> None:
    model = copy_model(tiny_model, home.directory / "plain")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    ended = home.farflung("learner", home.write_run("wrong", model), *servers.options)
    assert_refused(ended, 2, f"{model} has no chat template", "chat_template.jinja", "give prompts as plain strings")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("\n\n", ["tasks.source", "tasks.jsonl holds no task", "Write one JSON object per line"]),
        ('{"prompt": "a"}\n\n{"prompt": \n', ["tasks.jsonl, line 3: not JSON"]),
        ('{"question": "a"}\n', ["tasks.jsonl, line 1: no column 'prompt'", "question", "Set tasks.prompt_column"]),
        (
            json.dumps({"prompt": "x" * 600}) + "\n",
            ["task 0: the prompt has 600 tokens, but the model's context is 512", "Shorten or drop the task"],
        ),
    ],
)
def test_tasks_that_cannot_be_run_are_refused_by_place(
    home: Home, tiny_model: Path, servers: Servers, content: str, said: list[str]
) -> None:
    home.write("tasks.jsonl", content)
    assert_refused(home.farflung("learner", home.write_run("wrong", tiny_model), *servers.options), 2, *said)


def test_a_reward_that_is_not_there_is_refused(home: Home, tiny_model: Path, servers: Servers) -> None:
    config = home.write_run("wrong", tiny_model, environment={"rewards": ["rewards.py:low"]})
    ended = home.farflung("learner", config, *servers.options)
    assert_refused(ended, 2, "rewards.py:low: no such file", "relative to the configuration's folder")


# ------------------------------------------------------------------------------------------------------------- servers


def test_servers_that_cannot_be_reached_are_named_in_bounded_time(
    home: Home, tiny_model: Path, servers: Servers
) -> None:
    config = home.write_run("wrong", tiny_model)
    nats, s3 = free_port(), free_port()
    without_nats = home.start("learner", config, "--nats", f"nats://me:geheim@127.0.0.1:{nats}", "--s3", servers.s3)
    without_s3 = home.start(
        "learner", config, "--nats", servers.nats, "--s3", f"http://me:geheim@127.0.0.1:{s3}/farflung"
    )
    ended = without_nats.wait(within=60)
    assert_refused(ended, 3, f"NATS at nats://127.0.0.1:{nats} cannot be reached", "is the server running")
    assert "geheim" not in ended.err + ended.out
    ended = without_s3.wait(within=60)
    assert_refused(ended, 3, f"S3 at http://127.0.0.1:{s3}/farflung cannot be reached", "is the server running")
    assert "geheim" not in ended.err + ended.out


def test_wrong_credentials_are_told_and_not_shown(
    home: Home, tiny_model: Path, servers: Servers, nats_server: Server, store_server: Server
) -> None:
    config = home.write_run("wrong", tiny_model)
    nats = f"nats://farflung:geheim@127.0.0.1:{nats_server.launch.port}"
    ended = home.farflung("learner", config, "--nats", nats, "--s3", servers.s3)
    assert_refused(ended, 3, f"NATS at nats://127.0.0.1:{nats_server.launch.port}", "check the user and password")
    assert "geheim" not in ended.err + ended.out
    s3 = f"http://somebody:geheim@127.0.0.1:{store_server.launch.port}/farflung"
    ended = home.farflung("learner", config, "--nats", servers.nats, "--s3", s3)
    assert_refused(ended, 3, f"S3 at http://127.0.0.1:{store_server.launch.port}/farflung", "check the access key")
    assert "geheim" not in ended.err + ended.out


def test_no_server_named_and_no_profile_is_told_with_the_options(home: Home, tiny_model: Path) -> None:
    ended = home.farflung("learner", home.write_run("wrong", tiny_model))
    assert_refused(ended, 2, "no --nats URL (or FARFLUNG_NATS)", "start `farflung up` first")


def test_a_port_in_use_is_named(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for kind in ("broker", "store"):
            ended = home.farflung(kind, "--port", port)
            assert_refused(ended, 4, f"port {port} on 127.0.0.1 is in use", "choose --port")


# --------------------------------------------------------------------------------------------------------- a full disk


def _may_mount() -> bool:
    status = Path("/proc/self/status")
    if not status.exists():
        return False
    capabilities = next(line for line in status.read_text().splitlines() if line.startswith("CapEff"))
    return bool(int(capabilities.split()[1], 16) >> 21 & 1)  # CAP_SYS_ADMIN


MAY_MOUNT = _may_mount()


STEPS = 12
"""Long enough for the disk to fill up in between, short enough for what is stored to fit on it."""


class Disk:
    """A folder whose disk can be filled. Who may not mount gets a file in the way of what is to be written."""

    def __init__(self, path: Path, *, written: str) -> None:
        self.path = path
        self._obstacle = path / ("filler" if MAY_MOUNT else written)
        path.mkdir(parents=True)
        if MAY_MOUNT:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "farflung-test", path], check=True)

    def fill(self) -> None:
        self._obstacle.parent.mkdir(parents=True, exist_ok=True)
        with self._obstacle.open("wb", buffering=0) as file:
            try:
                while MAY_MOUNT:
                    file.write(bytes(4096))
            except OSError:
                return

    def free(self) -> None:
        self._obstacle.unlink()

    def close(self) -> None:
        if MAY_MOUNT:
            subprocess.run(["umount", "--lazy", self.path], check=True)


def test_a_directory_without_room_is_named_before_a_server_starts(home: Home) -> None:
    disk = Disk(home.directory / "disk", written="servers")
    try:
        disk.fill()
        ended = home.farflung("broker", "--port", free_port(), "--dir", disk.path / "servers")
        assert_refused(ended, 4, str(disk.path / "servers"), "cannot be written", "make room on its disk")
    finally:
        disk.close()


def test_groups_wait_while_the_store_is_full_and_the_run_goes_on_once_it_has_room(home: Home, tiny_model: Path) -> None:
    disk = Disk(home.directory / "disk", written="objects/farflung/runs")
    server = Server(store_launch(disk.path), home.directory / "store.log")
    server.start()
    try:
        disk.fill()
        with pytest.raises(StoreError, match="does its disk have room"):
            asyncio.run(_put(server.launch.url))
        config = home.write_run("full", tiny_model, run={"steps": STEPS})
        up = home.start("up", config, "--json", "--s3", server.launch.url)
        up.until(lambda: "the run waits for the store" in up.err, "a disk that is full at the start is told on screen")
        assert "does its disk have room" in up.err
        assert read_steps(home.directory / "runs" / "full") == []
        disk.free()
        up.until(lambda: made_step(home.directory / "runs" / "full", 1), "the run begins once there is room")
        if MAY_MOUNT:
            disk.fill()
            up.until(lambda: "groups wait for the store" in up.err, "a disk that fills up in mid-run is told on screen")
            disk.free()
        ended = up.wait()
    finally:
        server.stop()
        disk.close()
    assert ended.code == 0, ended.err
    assert ended.json["steps"] == STEPS
    assert ended.json["groups_trained"] + ended.json["groups_skipped"] == STEPS * 4, "every step had its groups"


async def _put(url: str) -> None:
    store = Store(StoreAddress.parse(url), attempts=1)
    try:
        await store.put("runs/x", bytes(1000))
    finally:
        store.close()


@pytest.mark.parametrize("limit", ["quota", *(["disk"] if MAY_MOUNT else [])])
async def test_a_broker_that_is_out_of_room_is_told_from_one_that_is_away(tmp_path: Path, limit: str) -> None:
    disk = Disk(tmp_path / "disk", written="unused") if limit == "disk" else None
    launch = nats_launch(disk.path if disk else tmp_path)
    if limit == "quota":
        config = tmp_path / "nats.conf"
        config.write_text(config.read_text().replace("max_file_store: 100GB", "max_file_store: 1MB"))
    server = Server(launch, tmp_path / "log")
    server.start()
    try:
        bus = await Bus.connect(launch.url, "test")
        await bus.ensure_stream(tasks_config("full"))
        await bus.publish(names.task_subject("full", "first"), big_task("first"), id="first")
        with pytest.raises((StoreError, ConnectionFailed), match="disk") as caught:
            for number in range(100):
                if disk:
                    disk.fill()
                group = f"g{number}"
                await bus.publish(names.task_subject("full", group), big_task(group), id=group, timeout=2)
        assert "tasks.full.1.g" in str(caught.value)
        held = await bus.subjects_held(names.tasks_stream("full"))
        assert names.task_subject("full", "first") in held, "what was stored stays"
        await bus.close()
    finally:
        server.stop()
        if disk:
            disk.close()


def big_task(group: str) -> Task:
    columns = {"prompt": "x" * 50_000}
    return Task(run="full", incarnation="i", group=group, index=0, columns=columns, group_size=2, seed=0)


# --------------------------------------------------------------------------------- a run to which much of this happens

ROUGH_REWARD = """
from pathlib import Path

MOOD = Path(__file__).with_name("mood")


def score(completions, how, **columns):
    mood = MOOD.read_text() if MOOD.exists() else how[0]
    if mood == "raises":
        raise ValueError("the scorer is out of order")
    if mood == "nan":
        return [float("nan") for _ in completions]
    if mood == "too few":
        return [1.0]
    return [float(len(completion)) for completion in completions]
"""

BAD_ROWS = {5: "raises", 25: "nan", 45: "too few"}
"""Tasks whose reward fails, far enough apart that never four groups fail in a row."""

LONG_ROW = 65
"""A task too long for the model, behind those that are measured at start."""


@dataclass(frozen=True)
class RoughRun:
    """A run that was interfered with while it went, and then failed for good."""

    home: Home
    directory: Path
    second_up: Ended
    second_learner: Ended
    step_then: int
    """The step it had made when all that had happened."""
    letters: list[DeadLetter]
    ended: Ended


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[RoughRun]:
    home = Home(tmp_path_factory.mktemp("rough"))
    home.write("reward.py", ROUGH_REWARD)
    rows = [{"prompt": f"say {n}", "how": BAD_ROWS.get(n, "good")} for n in range(LONG_ROW)]
    rows.append({"prompt": "x" * 600, "how": "good"})
    home.write("tasks.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = home.write_run(
        "rough",
        tiny_model,
        run={"steps": 1000},
        tasks={"shuffle": False},
        environment={"rewards": ["reward.py:score"]},
        algorithm={"group_size": 4, "groups_per_step": 2},
        fleet={"actors": 2},
    )
    directory = home.directory / "runs" / "rough"
    try:
        up = home.start("up", config)
        up.until(lambda: made_step(directory, 2), "step 2")
        second_up = home.farflung("up", config)
        second_learner = home.farflung("learner", config, "--profile", directory / "profile.toml")
        letters = asyncio.run(inject(directory))
        step_then = read_steps(directory)[-1]["step"]
        up.until(lambda: made_step(directory, max(step_then + 5, 34)), "steps after all that")
        up.until(lambda: re.search(r"failed groups: \d+ reward, \d+ task; last: ", up.out), "failures on screen")
        home.write("mood", "raises")
        yield RoughRun(home, directory, second_up, second_learner, step_then, letters, up.wait())
    finally:
        home.close()


async def inject(directory: Path) -> list[DeadLetter]:
    """Send messages that nobody can use to each component; returns what became of them."""
    found = profile.read(directory / "profile.toml")
    bus = await Bus.connect(found.nats, "test")
    request = GenerateRequest(
        id="x", run="rough", group="x", siblings=1, adapter=None, version=0, prompt=pack_ids([1]),
        max_new_tokens=1, temperature=1.0, stop_token_ids=[],
    )  # fmt: skip
    for message in (b"\xff no msgpack", msgpack.packb(msgpack.unpackb(request.encode()) | {"schema": 99})):
        await bus.client.publish(names.generate_subject("tiny"), message)
        await bus.jetstream.publish(names.task_subject("rough", f"x{len(message)}"), message)
        await publish_group(bus, f"x{len(message)}", message)
    letters: list[DeadLetter] = []

    async def read() -> None:
        info = await bus.jetstream.stream_info(names.DEAD_STREAM)
        for sequence in range(len(letters) + 1, int(info.state.messages) + 1):
            stored = await bus.jetstream.get_msg(names.DEAD_STREAM, sequence)
            letters.append(decode(stored.data or b"", DeadLetter))

    async with asyncio.timeout(60):
        while len(letters) < 6:
            await read()
    await bus.close()
    return letters


async def publish_group(bus: Bus, name: str, message: bytes) -> None:
    """The stream of groups is bounded: wait for room."""
    async with asyncio.timeout(60):
        while True:
            try:
                await bus.jetstream.publish(names.group_subject("rough", name), message)
            except APIError:
                await asyncio.sleep(0.05)
            else:
                return


def test_a_second_up_in_the_same_directory_is_refused(rough: RoughRun) -> None:
    assert_refused(rough.second_up, 5, str(rough.directory), "another `farflung up` is running", "choose another --dir")


def test_a_second_learner_is_refused_and_the_first_goes_on(rough: RoughRun) -> None:
    assert_refused(rough.second_learner, 5, "run rough is held by the learner learner-", "--take-over")
    assert read_steps(rough.directory)[-1]["step"] >= rough.step_then + 5


def test_messages_nobody_can_use_are_kept_with_the_reason_and_stop_nothing(rough: RoughRun) -> None:
    kept: dict[tuple[str, str], list[str]] = {}
    for letter in rough.letters:
        place = (letter.component.split("-")[0], letter.subject.split(".")[0])
        kept.setdefault(place, []).append(letter.reason)
    assert set(kept) == {("router", "generate"), ("actor", "tasks"), ("learner", "groups")}
    for reasons in kept.values():
        unknown, malformed = sorted(reasons)
        assert "expected schema 1, got 99" in unknown
        assert "not msgpack" in malformed
    assert read_steps(rough.directory)[-1]["step"] >= rough.step_then + 5


def test_a_group_that_fails_is_counted_under_its_reason_and_the_run_goes_on(rough: RoughRun) -> None:
    said = (rough.directory / "logs" / "learner.log").read_text()
    for reason in (
        "score raised ValueError: the scorer is out of order",
        "score returned 'nan' (float); expected a finite number",
        "score returned 1 values for 4 completions; expected as many",
        "the prompt has 600 tokens and the model's context 512",
    ):
        assert f"4 of 4 episodes failed: {reason}" in said
    last = read_steps(rough.directory)[-1]
    assert last["failed"] >= 4
    assert last["issued"] == last["open"] + sum(
        last[name] for name in ("trained", "dropped", "skipped", "failed", "expired")
    )


def test_a_run_whose_groups_all_fail_stops_and_tells_why(rough: RoughRun) -> None:
    assert_refused(
        rough.ended, 6, "run rough: 4 groups failed in a row", "the last one with: reward: 4 of 4 episodes failed",
        "the scorer is out of order", "reward.py:", "Mend that and start again",
    )  # fmt: skip
    [listed] = rough.home.farflung("runs", "list", "--json", "--dir", rough.directory).json
    assert listed["state"] == "failed"
    assert listed["step"] == read_steps(rough.directory)[-1]["step"], "it goes on from its last commit"
