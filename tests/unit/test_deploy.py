"""The command line's smaller parts: profiles, cores, ports, what a person sees."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from broker.bus import Bus
from broker.chat import ChatTokenizer, prompt_ids
from broker.errors import ConfigError, RunConflict, ServerError
from broker.locks import file_lock
from broker.messages import GenerateRequest, Node, unpack_ids
from broker.models import resolve
from deploy import queries
from deploy.children import Threads, share_cores
from deploy.cli import cli
from deploy.processes import write_private
from deploy.profile import Connection, Profile, find, read, write
from deploy.servers import Server, free_port, nats_launch, store_launch
from deploy.snapshot import snapshot_of
from deploy.supervisor import Up, UpOptions
from deploy.view import duration, live, print_status, sparkline
from tests.unit.test_learner_parts import head, spec


@pytest.mark.parametrize(
    ("total", "actors", "expected"),
    [(1, 2, Threads(1, 1)), (2, 2, Threads(1, 1)), (8, 2, Threads(4, 2)), (16, 1, Threads(8, 8))],
)
def test_components_divide_the_cores_without_using_one_twice(total: int, actors: int, expected: Threads) -> None:
    shared = share_cores(total, actors)
    assert shared == expected
    assert shared.learner + actors * shared.actor <= max(total, 1 + actors)


def test_options_win_over_the_profile_and_a_missing_profile_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FARFLUNG_PROFILE", raising=False)
    nothing: dict[str, Any] = dict.fromkeys(("nats", "s3", "access_key", "secret_key", "profile"))
    with pytest.raises(ConfigError, match="--nats URL"):
        find(**nothing)
    path = tmp_path / "p.toml"
    write(Profile(nats="nats://a:b@h:1", s3="http://k:s@h:2/bucket"), path)
    kept = find(**{**nothing, "profile": str(path)})
    assert (kept.nats, kept.store.access_key, kept.store.bucket) == ("nats://a:b@h:1", "k", "bucket")
    other = find(**{**nothing, "profile": str(path), "nats": "nats://x", "access_key": "mine"})
    assert (other.nats, other.store.access_key, other.store.secret_key) == ("nats://x", "mine", "s")
    path.write_text("nats = 3")
    with pytest.raises(ConfigError, match="not valid"):
        read(path)


def test_private_files_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "secret"
    write_private(path, b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    launch = nats_launch(tmp_path)
    store_launch(tmp_path)
    for name in ("nats.json", "nats.conf", "store.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    again = nats_launch(tmp_path)
    assert again.url == launch.url, "port and credentials are made once and kept"


def test_a_port_in_use_is_refused_when_it_was_asked_for_and_replaced_when_it_was_only_remembered(
    tmp_path: Path,
) -> None:
    first = nats_launch(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first.port))
        taken.listen()
        with pytest.raises(ServerError, match=f"port {first.port} on 127.0.0.1 is in use"):
            nats_launch(tmp_path, port=first.port)
        assert nats_launch(tmp_path).port != first.port


def test_no_secret_is_on_a_servers_command_line(tmp_path: Path) -> None:
    for launch in (nats_launch(tmp_path), store_launch(tmp_path)):
        secret = launch.url.split("@")[0].rsplit(":", 1)[1]
        assert secret not in " ".join(launch.command)


def test_a_lock_tells_who_waits_in_vain(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):  # the lock is free again once its holder has left
        with (
            file_lock(path, wait=False),
            pytest.raises(RunConflict, match="busy here"),
            file_lock(path, wait=False, busy="busy here"),
        ):
            raise AssertionError("unreachable")


def up_in(directory: Path, origin: str | None) -> Up:
    options = UpOptions(
        directory / "x.toml", directory, nats=None, s3=None, restart=False, origin=origin, adapter=None,
        fresh_optimizer=False, threads_learner=None, threads_actor=None,
    )  # fmt: skip
    return Up(spec(), options, Console())


def test_a_branched_run_uses_the_servers_of_its_origin_and_not_while_the_origin_is_up(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "servers").mkdir(parents=True)
    new.mkdir()
    with (
        up_in(old, None)._hold_servers(old),
        pytest.raises(RunConflict, match="in use by another `farflung up`"),
        up_in(new, "old@3")._hold_servers(new),
    ):
        raise AssertionError("unreachable")
    for origin in ("old@3", None):  # from then on without being told
        with up_in(new, origin)._hold_servers(new):
            assert (new / "servers").resolve() == (old / "servers").resolve()
    shutil.rmtree(old)
    with pytest.raises(ServerError, match="which are gone"), up_in(new, None)._hold_servers(new):
        raise AssertionError("unreachable")


def test_a_fresh_optimizer_without_a_branch_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "x.toml"
    config.write_text(
        '[run]\nname = "r"\nmodel = "m"\n[tasks]\nsource = "t.jsonl"\n[environment]\nrewards = ["r.py:f"]\n'
    )
    for command in ("up", "learner"):
        done = CliRunner().invoke(cli, [command, str(config), "--fresh-optimizer"])
        assert isinstance(done.exception, ConfigError)
        assert "--from RUN@VERSION" in str(done.exception)


def test_every_command_has_help_with_an_example() -> None:
    def walk(command: object, path: list[str]) -> None:
        done = CliRunner().invoke(cli, [*path, "--help"])
        assert done.exit_code == 0, path
        for name, child in getattr(command, "commands", {}).items():
            walk(child, [*path, name])
        if not hasattr(command, "commands"):
            assert "Example:  farflung " in done.output, path

    walk(cli, [])
    assert "farflung" in CliRunner().invoke(cli, ["--version"]).output


def test_numbers_are_shown_as_people_write_them() -> None:
    assert [duration(value) for value in (5, 89, 95, 3600 * 2 + 60)] == ["5 s", "89 s", "1 min 35 s", "2 h 01 min"]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
    assert sparkline([]) == ""


def asked(**given: str | None) -> dict[str, Any]:
    """The connection options of a query."""
    nothing = dict.fromkeys(("nats", "s3", "s3_access_key", "s3_secret_key", "s3_region", "profile"))
    return {**nothing, **given}


async def test_a_query_uses_the_servers_of_an_up_that_runs_and_leaves_their_data_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[Connection] = []

    @asynccontextmanager
    async def connected(connection: Connection, component: str) -> AsyncIterator[tuple[None, None, None]]:
        reached.append(connection)
        yield None, None, None

    monkeypatch.setattr(queries, "connected", connected)
    servers = tmp_path / "servers"
    nats, store = nats_launch(servers), store_launch(servers)
    write(Profile(nats=nats.url, s3=store.url), tmp_path / "profile.toml")
    before = {name: (servers / name).read_bytes() for name in ("nats.json", "nats.conf", "store.json")}
    with socket.create_server(("127.0.0.1", nats.port)), file_lock(servers / "lock", wait=False):
        async with queries.opened(asked(), tmp_path), queries.opened(asked(), tmp_path):
            pass
    assert {connection.nats for connection in reached} == {nats.url}
    assert before == {name: (servers / name).read_bytes() for name in before}
    assert not (servers / "query.log").exists(), "no server was started"


@pytest.mark.servers
async def test_queries_of_one_directory_start_its_servers_in_turn(tmp_path: Path) -> None:
    servers = tmp_path / "servers"
    nats_launch(servers), store_launch(servers)
    inside = 0

    async def ask() -> None:
        nonlocal inside
        async with queries.opened(asked(), tmp_path) as services:
            inside += 1
            assert inside == 1
            assert await services.registry.heads() == []
            inside -= 1

    await asyncio.gather(ask(), ask())


async def test_a_query_that_waits_too_long_for_another_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "TURN_SECONDS", 0.0)
    servers = tmp_path / "servers"
    nats_launch(servers)
    with (
        file_lock(servers / "query.lock", wait=False),
        pytest.raises(RunConflict, match="another command has started the servers"),
    ):
        async with queries.opened(asked(), tmp_path):
            raise AssertionError("unreachable")


async def test_a_query_of_a_directory_that_never_had_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no servers of `farflung up`"):
        async with queries.opened(asked(), tmp_path):
            raise AssertionError("unreachable")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["broker", "store"])
def test_a_directory_has_one_server_of_a_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[BaseException | None] = []
    command = [kind, "--dir", str(tmp_path), "--port"]

    def second(server: Server) -> int:
        refused.append(CliRunner().invoke(cli, [*command, str(free_port())]).exception)
        return 0

    monkeypatch.setattr(Server, "start", lambda server: None)
    monkeypatch.setattr(Server, "wait", second)
    assert CliRunner().invoke(cli, [*command, str(free_port())]).exit_code == 0
    [error] = refused
    assert isinstance(error, RunConflict)
    assert f"another `farflung {kind}` runs on {tmp_path}" in str(error)


def test_what_a_node_says_is_shown_as_it_is() -> None:
    said = "no [/INST] in the [train] template :x:"
    replica = Node(id="rep[/a]", node="replica", fleet="f", host="h", pid=1, state="ready", detail=said)
    with StringIO() as out:
        console = Console(file=out, width=200)
        console.print(live(snapshot_of(head(), [replica]), [], ""))
        print_status(console, [snapshot_of(head(), [replica])], [({}, {})], [None], 0)
        shown = out.getvalue()
    assert shown.count(said) == 2
    assert shown.count("rep[/a]") == 2


def test_queries_show_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = "pulled to runs/[/b][bold] :smile:"
    queries._console().print(said)
    assert capsys.readouterr().out.strip() == said


async def test_the_sample_answers_are_asked_for_as_the_episodes_were(tmp_path: Path, tiny_model: Path) -> None:
    class Asked:
        prompts: ClassVar[list[list[int]]] = []

        async def request(self, subject: str, request: GenerateRequest, timeout: float) -> None:
            self.prompts.append(unpack_ids(request.prompt).tolist())

    question = [{"role": "user", "content": "2 + 3?"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": question}) + "\n")
    up = up_in(tmp_path, None)
    told = msgspec.structs.replace(spec().environment, system_prompt="Be brief.")
    up._spec = msgspec.structs.replace(spec(), environment=told)
    files = resolve(str(tiny_model))
    await up._ask_before_and_after(cast("Bus", Asked()), {"adapter_name": "r-v000001-aaaaaaaa", "head": 1}, files)
    tokenizer = ChatTokenizer.from_directory(tiny_model)
    said = prompt_ids(tokenizer, [{"role": "system", "content": "Be brief."}, *question])
    assert Asked.prompts == [list(said)] * 6
