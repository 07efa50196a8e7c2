"""Where the broker and the store are, and with which credentials.

An option wins over a profile that an option names, that over the environment, and that over the current profile. Keys
of the environment count only for a store URL that has none.

`farflung up` writes a profile, readable by its owner alone, and remembers it as the current one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from broker.errors import ConfigError, ServerError
from broker.store import StoreAddress
from deploy.processes import write_private


class Profile(msgspec.Struct, forbid_unknown_fields=True):
    """What a profile file holds, as TOML."""

    nats: str
    s3: str


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach broker and store."""

    nats: str
    store: StoreAddress


def current_path() -> Path:
    """The current profile: `FARFLUNG_PROFILE`, else the one in the user's configuration folder."""
    named = os.environ.get("FARFLUNG_PROFILE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "farflung" / "profile.toml"


def write(profile: Profile, path: Path) -> None:
    """Write a profile that only its owner may read."""
    write_private(path, f'nats = "{profile.nats}"\ns3 = "{profile.s3}"\n'.encode())


def remember(profile: Profile) -> None:
    """Make it the current profile; a home that cannot be written to is no reason to fail."""
    with contextlib.suppress(ServerError):
        write(profile, current_path())


def read(path: Path) -> Profile:
    """Read a profile. Raises ConfigError."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {error.strerror}") from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"the profile {path} is not valid: {error}; expected the keys nats and s3") from None


def find(
    *,
    nats: str | None,
    s3: str | None,
    access_key: str | None,
    secret_key: str | None,
    profile: str | None,
    region: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Connection:
    """Put options, environment and profile together. Raises ConfigError."""
    kept: Profile | None = None
    if not profile:
        nats = nats or environment.get("FARFLUNG_NATS")
        s3 = s3 or environment.get("FARFLUNG_S3")
    if not (nats and s3):
        path = Path(profile) if profile else current_path()
        if path.exists() or profile:
            kept = read(path)
    nats = nats or (kept.nats if kept else None)
    s3 = s3 or (kept.s3 if kept else None)
    if not nats or not s3:
        missing = "--nats URL (or FARFLUNG_NATS)" if not nats else "--s3 URL (or FARFLUNG_S3)"
        raise ConfigError(f"no {missing}, and no profile at {current_path()}; give it, or start `farflung up` first")
    address = StoreAddress.parse(
        s3,
        access_key=access_key or "",
        secret_key=secret_key or "",
        region=region or "",
        environment=environment,
    )
    return Connection(nats=nats, store=address)
