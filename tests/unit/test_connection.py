"""Which broker and which store a command takes, and with which keys."""

from __future__ import annotations

import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner
from rich.console import Console

from broker.errors import ConfigError, ConnectionFailed
from broker.store import Store, StoreAddress
from deploy import components, running
from deploy.cli import cli
from deploy.profile import Connection, Profile, find, write
from deploy.supervisor import Up, UpOptions
from tests.unit.test_learner_parts import spec

ELSEWHERE = {
    "FARFLUNG_NATS": "nats://elsewhere:1",
    "FARFLUNG_S3": "http://e:e@elsewhere:2/elsewhere",
    "AWS_ACCESS_KEY_ID": "of-the-shell",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-shell",
}


def found(environment: dict[str, str], **options: str) -> Connection:
    nothing = {"nats": None, "s3": None, "access_key": None, "secret_key": None, "profile": None}
    return find(**{**nothing, **options}, environment=environment)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile that is also the current one."""
    path = tmp_path / "profile.toml"
    write(Profile(nats="nats://kept:1", s3="http://k:s@kept:2/bucket"), path)
    monkeypatch.setenv("FARFLUNG_PROFILE", str(path))
    return str(path)


def test_a_profile_that_an_option_names_wins_over_the_environment(kept: str) -> None:
    connection = found(ELSEWHERE, profile=kept)
    assert (connection.nats, connection.store.endpoint) == ("nats://kept:1", "kept:2")


def test_the_environment_wins_over_the_current_profile(kept: str) -> None:
    connection = found(ELSEWHERE)
    assert (connection.nats, connection.store.endpoint) == ("nats://elsewhere:1", "elsewhere:2")
    assert found({}).nats == "nats://kept:1"


def test_an_option_wins_over_everything(kept: str) -> None:
    connection = found(ELSEWHERE, profile=kept, nats="nats://option:1", s3="http://o:p@option:2/bucket")
    assert (connection.nats, connection.store.endpoint) == ("nats://option:1", "option:2")


@pytest.mark.parametrize(
    ("url", "options", "environment", "keys"),
    [
        ("http://k:s@h/bucket", {}, ELSEWHERE, ("k", "s")),
        ("http://k:s@h/bucket", {"access_key": "o", "secret_key": "p"}, ELSEWHERE, ("o", "p")),
        ("http://k@h/bucket", {}, ELSEWHERE | {"FARFLUNG_S3_SECRET_KEY": "t"}, ("k", "t")),
        (
            "http://h/bucket",
            {},
            ELSEWHERE | {"FARFLUNG_S3_ACCESS_KEY": "f", "FARFLUNG_S3_SECRET_KEY": "g"},
            ("f", "g"),
        ),
        ("http://h/bucket", {}, ELSEWHERE, ("of-the-shell", "secret-of-the-shell")),
        ("http://h/bucket", {}, {}, ("", "")),
    ],
)
def test_keys_come_from_options_then_the_url_then_the_environment(
    url: str, options: dict[str, str], environment: dict[str, str], keys: tuple[str, str]
) -> None:
    store = found(environment, nats="nats://h", s3=url, **options).store
    assert (store.access_key, store.secret_key) == keys


def test_a_command_takes_the_profile_it_is_told_whatever_the_environment_says(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Connection] = []

    def router(connection: Connection, *_: Any) -> None:
        taken.append(connection)

    def run(_component: str, _instance: str, main: Any, **_: Any) -> int:
        main()
        return 0

    monkeypatch.setattr(components, "router", router)
    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr(running, "end", lambda code: None)
    for name, value in ELSEWHERE.items():
        monkeypatch.setenv(name, value)
    for arguments in (["--profile", kept], []):
        done = CliRunner().invoke(cli, ["router", *arguments])
        assert done.exception is None, done.output
    assert [connection.nats for connection in taken] == ["nats://kept:1", "nats://elsewhere:1"]
    assert (taken[0].store.access_key, taken[0].store.secret_key) == ("k", "s")


def test_what_up_starts_goes_where_up_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(arguments: list[str], *, env: dict[str, str], **_: Any) -> None:
        started.append((arguments, env))

    monkeypatch.setattr(subprocess, "Popen", popen)
    for name, value in (ELSEWHERE | {"FARFLUNG_PROFILE": "/elsewhere.toml", "OF_THE_USER": "kept"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "logs").mkdir()
    write(Profile(nats="nats://up:1", s3="http://k:s@up:2/bucket"), tmp_path / "profile.toml")
    options = UpOptions(
        config=tmp_path / "x.toml", directory=tmp_path, nats=None, s3=None, restart=False, origin=None, adapter=None,
        fresh_optimizer=False, threads_learner=None, threads_actor=None,
    )  # fmt: skip
    Up(spec(), options, Console())._spawn(tmp_path)
    assert {arguments[3] for arguments, _ in started} == {"learner", "router", "actor"}
    for arguments, environment in started:
        assert not {"FARFLUNG_NATS", "FARFLUNG_S3", "FARFLUNG_PROFILE"} & environment.keys()
        assert environment["OF_THE_USER"] == "kept"
        connection = found(environment, profile=arguments[arguments.index("--profile") + 1])
        assert (connection.nats, connection.store.endpoint) == ("nats://up:1", "up:2")
        assert (connection.store.access_key, connection.store.secret_key) == ("k", "s")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://AKIA:geheim/geheim", "is no S3 URL"),
        ("https://AKIA:geheim@h:port/b", "'h:port/b' is no S3 URL: its host or its port is not valid"),
        ("http://[::1:9000/b", "its host or its port is not valid"),
        ("http://k:geheim@h:9000/bucket/prefix", "'h:9000/bucket/prefix' names more than a bucket"),
        ("http://k:geheim@h:9000/bucket?versioning", "names more than a bucket"),
        ("http://k:geheim@h:9000/b_!", "'http://h:9000/b_!' is no S3 URL: invalid bucket name"),
        ("http://k@h/bucket", "an S3 access key but no secret key"),
        ("http://:geheim@h/bucket", "an S3 secret key but no access key"),
        ("https://k:geheim@nonsense.amazonaws.com/bucket", "invalid Amazon AWS host"),
    ],
)
def test_a_store_url_that_cannot_be_used_is_refused_without_its_secret(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StoreAddress.parse(url)
    assert message in str(refused.value)
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://AKIA:abc/de+f@h/bucket", ("h", "AKIA", "abc/de+f", "bucket")),
        ("https://AKIA:abc%2Fde%2Bf@h:443/bucket/", ("h", "AKIA", "abc/de+f", "bucket")),
        ("http://k:s@[::1]:9000/bucket", ("[::1]:9000", "k", "s", "bucket")),
        ("http://k:s@[::1]:80", ("[::1]", "k", "s", "farflung")),
    ],
)
def test_a_store_url_is_read_as_people_paste_it(url: str, expected: tuple[str, str, str, str]) -> None:
    address = StoreAddress.parse(url)
    assert (address.endpoint, address.access_key, address.secret_key, address.bucket) == expected
    built = Store(address)._client._base_url.build(method="GET", region="us-east-1", bucket_name=address.bucket)
    assert (built.netloc, built.path) == (address.endpoint, f"/{address.bucket}")


@pytest.mark.parametrize(
    ("url", "environment", "region", "host"),
    [
        ("https://s3.eu-central-1.amazonaws.com/bucket", {}, "eu-central-1", "bucket.s3.eu-central-1.amazonaws.com"),
        (
            "https://s3.eu-central-1.amazonaws.com/bucket",
            {"AWS_REGION": "us-west-2"},
            "eu-central-1",
            "bucket.s3.eu-central-1.amazonaws.com",
        ),
        (
            "https://s3.amazonaws.com/bucket",
            {"AWS_DEFAULT_REGION": "us-west-2"},
            "us-west-2",
            "bucket.s3.us-west-2.amazonaws.com",
        ),
        ("http://h:9000/bucket", {"AWS_REGION": "us-west-2"}, "us-east-1", "h:9000"),
        ("http://h:9000/bucket", {"FARFLUNG_S3_REGION": "garage"}, "garage", "h:9000"),
    ],
)
def test_requests_are_signed_for_the_region_of_the_bucket(
    url: str, environment: dict[str, str], region: str, host: str
) -> None:
    client = Store(found(environment, nats="nats://h", s3=url).store)._client
    assert client._get_region("bucket") == region
    assert client._base_url.build(method="GET", region=region, bucket_name="bucket", object_name="x").netloc == host


def test_aws_says_itself_where_a_bucket_is_when_nothing_else_does() -> None:
    assert StoreAddress.parse("https://s3.amazonaws.com/bucket").region == ""
    assert StoreAddress.parse("https://s3.amazonaws.com/bucket", region="eu-west-1").region == "eu-west-1"


class Refusing(BaseHTTPRequestHandler):
    """A store that takes no request, and remembers what it was asked with."""

    tokens: ClassVar[list[str | None]] = []

    def do_HEAD(self) -> None:
        self.tokens.append(self.headers["X-Amz-Security-Token"])
        self.send_response(400)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


async def test_temporary_keys_go_with_their_token_and_only_a_refusal_of_keys_blames_them() -> None:
    aws = ELSEWHERE | {"AWS_SESSION_TOKEN": "token"}
    ours = aws | {
        "FARFLUNG_S3_ACCESS_KEY": "f",
        "FARFLUNG_S3_SECRET_KEY": "g",
        "FARFLUNG_S3_SESSION_TOKEN": "ours",
    }
    Refusing.tokens.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        place = f"127.0.0.1:{server.server_port}/bucket"
        try:
            for url, environment in (
                (f"http://{place}", aws),
                (f"http://{place}", ours),
                (f"http://k:s@{place}", ours),
            ):
                store = Store(found(environment, nats="nats://h", s3=url).store)
                with pytest.raises(ConnectionFailed) as refused:
                    await store.open(timeout=-1)
                store.close()
                assert "check the access key" not in str(refused.value)
        finally:
            server.shutdown()
            thread.join()
    assert Refusing.tokens == ["token", "ours", None]
