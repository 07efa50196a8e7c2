"""The object store: any S3, used so that the least of them is enough.

Objects are immutable, each key is written by one writer and ends in the content's sha256, and whoever reads verifies
size and sha256 against what the message or the registry recorded. No conditional put, no user metadata, no
overwriting: some servers ignore or lose them.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import urllib3
from minio import Minio
from minio.error import InvalidResponseError, MinioException, S3Error
from minio.helpers import BaseURL, check_bucket_name

from broker.clock import now
from broker.errors import ConfigError, ConnectionFailed, ObjectCorrupt, ObjectMissing, StoreError
from broker.messages import BlobRef

log = logging.getLogger(__name__)

T = TypeVar("T")

DENIED = {
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidSecurity",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
MISSING = {"NoSuchKey", "NoSuchBucket", "NotFound"}

EXPECTED = "expected http(s)://ACCESS:SECRET@host:port/bucket"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store is and who asks. Written as `http(s)://ACCESS:SECRET@host:port/bucket`."""

    endpoint: str
    secure: bool
    access_key: str
    secret_key: str
    bucket: str = "farflung"
    region: str = "us-east-1"
    """Empty: the store is asked where the bucket is."""
    session_token: str = ""
    """What temporary keys go with."""

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        access_key: str = "",
        secret_key: str = "",
        region: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> StoreAddress:
        """Read a store URL. Keys given apart from it win; those of `environment` stand in where the URL has none.

        The AWS_* keys are taken together or not at all, when nothing else names a key; a session token only with the
        keys beside which it stands. The region is the one given, else the host's, else, at AWS alone, that of AWS_*.
        Raises ConfigError.
        """
        around = environment or {}
        scheme, host, port, username, password, bucket = _split(url)
        access_key = access_key or username or around.get("FARFLUNG_S3_ACCESS_KEY", "")
        session_token = "" if secret_key or password else around.get("FARFLUNG_S3_SESSION_TOKEN", "")
        secret_key = secret_key or password or around.get("FARFLUNG_S3_SECRET_KEY", "")
        region = region or around.get("FARFLUNG_S3_REGION", "")
        if not access_key and not secret_key and around.get("AWS_ACCESS_KEY_ID"):
            access_key = around.get("AWS_ACCESS_KEY_ID", "")
            secret_key = around.get("AWS_SECRET_ACCESS_KEY", "")
            session_token = around.get("AWS_SESSION_TOKEN", "")
        if bool(access_key) != bool(secret_key):
            given, lacking = ("access", "secret") if access_key else ("secret", "access")
            raise ConfigError(f"the store has an S3 {given} key but no {lacking} key; {EXPECTED}")
        endpoint = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
        try:
            base = BaseURL(f"{scheme}://{endpoint}", region or None)
            check_bucket_name(bucket, s3_check=base.is_aws_host)
        except ValueError as error:
            raise ConfigError(f"'{scheme}://{endpoint}/{bucket}' is no S3 URL: {error}") from None
        if base.is_aws_host:
            region = base.region or around.get("AWS_REGION") or around.get("AWS_DEFAULT_REGION") or ""
        else:
            region = base.region or "us-east-1"
        return cls(
            endpoint=endpoint,
            secure=scheme == "https",
            access_key=access_key,
            secret_key=secret_key,
            bucket=bucket,
            region=region,
            session_token=session_token,
        )

    @property
    def shown(self) -> str:
        """The address without its secrets."""
        return f"{'https' if self.secure else 'http'}://{self.endpoint}/{self.bucket}"


class Store:
    """An S3 bucket. Every call runs in a thread of a small pool, so that nothing blocks the event loop."""

    def __init__(
        self, address: StoreAddress, *, threads: int = 16, attempts: int = 4, client: Minio | None = None
    ) -> None:
        self.address = address
        self._attempts = attempts
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="store")
        self._client = client or Minio(
            address.endpoint,
            access_key=address.access_key or None,
            secret_key=address.secret_key or None,
            session_token=address.session_token or None,
            secure=address.secure,
            region=address.region or None,
            http_client=urllib3.PoolManager(
                maxsize=threads, timeout=urllib3.Timeout(connect=5, read=60), retries=urllib3.Retry(0, redirect=2)
            ),
        )

    async def open(self, *, timeout: float = 15.0) -> None:
        """Make sure the bucket is there and may be used.

        Raises ConnectionFailed, naming the URL, when the store cannot be reached or refuses the credentials.
        """

        def prepare() -> None:
            if not self._client.bucket_exists(self.address.bucket):
                self._client.make_bucket(self.address.bucket)
            next(iter(self._client.list_objects(self.address.bucket, prefix="none/")), None)

        deadline = now() + timeout
        while True:
            try:
                await self._run(prepare)
                return
            except S3Error as error:
                if error.code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    return
                if error.code in DENIED:
                    raise ConnectionFailed(
                        f"S3 at {self.address.shown} refused: {error.code}; check the access key, the secret key, and "
                        "the session token if there is one"
                    ) from error
                if now() > deadline:
                    raise ConnectionFailed(
                        f"S3 at {self.address.shown} refused: {error.code}: {error.message}"
                    ) from error
            except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
                if now() > deadline:
                    raise ConnectionFailed(
                        f"S3 at {self.address.shown} cannot be reached ({_brief(error)}); "
                        "is the server running, and is the URL right?"
                    ) from error
            await asyncio.sleep(0.5)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def put(self, prefix: str, data: bytes) -> BlobRef:
        """Store `data` under `{prefix}.{sha256}` and return what identifies it. Raises StoreError."""
        ref = reference(prefix, data)

        def upload() -> None:
            self._client.put_object(self.address.bucket, ref.key, io.BytesIO(data), len(data))

        await self._retry(upload, f"put {ref.key} ({len(data)} bytes)")
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        """The object, verified against its size and sha256. Raises ObjectMissing, ObjectCorrupt or StoreError."""
        data = await self.read(ref.key)
        if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise ObjectCorrupt(f"{ref.key}: expected {ref.size} bytes with sha256 {ref.sha256}, got {len(data)} bytes")
        return data

    async def get_patiently(self, ref: BlobRef) -> bytes:
        """Like `get`, but a store that is away is waited for. Raises ObjectMissing or ObjectCorrupt."""
        while True:
            try:
                return await self.get(ref)
            except (ObjectMissing, ObjectCorrupt):
                raise
            except StoreError as error:
                log.warning("waiting for the store: %s", error)
                await asyncio.sleep(2.0)

    async def read(self, key: str) -> bytes:
        """The object's bytes, unverified. Raises ObjectMissing or StoreError."""

        def download() -> bytes:
            response = self._client.get_object(self.address.bucket, key)
            try:
                return bytes(response.read())
            finally:
                response.close()
                response.release_conn()

        return await self._retry(download, f"get {key}")

    async def exists(self, ref: BlobRef) -> bool:
        """Whether the object is there with its recorded size. Does not read it."""

        def look() -> bool:
            return bool(self._client.stat_object(self.address.bucket, ref.key).size == ref.size)

        try:
            return await self._retry(look, f"stat {ref.key}")
        except ObjectMissing:
            return False

    async def list(self, prefix: str) -> list[tuple[str, float]]:
        """Keys under `prefix` with the time each was written (seconds since the epoch, by the store's clock)."""

        def walk() -> list[tuple[str, float]]:
            found = self._client.list_objects(self.address.bucket, prefix=prefix, recursive=True)
            return [(item.object_name, item.last_modified.timestamp()) for item in found if not item.is_dir]

        return await self._retry(walk, f"list {prefix}")

    async def remove(self, key: str) -> None:
        """Remove an object; one that is gone already is no error."""
        try:
            await self._retry(lambda: self._client.remove_object(self.address.bucket, key), f"remove {key}")
        except ObjectMissing:
            return

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def _retry(self, call: Callable[[], T], what: str) -> T:
        for attempt in range(self._attempts):
            try:
                return await self._run(call)
            except S3Error as error:
                if error.code in MISSING:
                    raise ObjectMissing(f"{what}: no such object in {self.address.shown}") from error
                if error.code in DENIED:
                    raise StoreError(f"{what}: {self.address.shown} refused: {error.code}") from error
                problem: Exception = error
            except InvalidResponseError as error:
                # Some servers answer a missing key with a plain-text 404.
                if "404" in str(error):
                    raise ObjectMissing(f"{what}: no such object in {self.address.shown}") from error
                problem = error
            except (MinioException, urllib3.exceptions.HTTPError, OSError) as error:
                problem = error
            if attempt + 1 < self._attempts:
                await asyncio.sleep(0.25 * 3**attempt)
        raise StoreError(
            f"{what} failed {self._attempts} times at {self.address.shown}: {_brief(problem)}; "
            "is the store up, and does its disk have room?"
        ) from problem


def _split(url: str) -> tuple[str, str, int | None, str, str, str]:
    """Scheme, host, port (None: the scheme's own), both keys, and bucket of a store URL.

    The keys end at the last @, so that a secret with a slash may stand as it is. Raises ConfigError, which quotes
    nothing that may be a key.
    """
    scheme, _, rest = url.partition("://")
    keys, at, place = rest.rpartition("@")
    access, _, secret = keys.partition(":")
    shown = repr(place) if at else "the store's URL"
    try:
        parts = urlsplit(f"{scheme}://{place}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"{shown} is no S3 URL: its host or its port is not valid; {EXPECTED}") from None
    if scheme not in ("http", "https") or not host:
        raise ConfigError(f"{shown} is no S3 URL; {EXPECTED}")
    bucket = parts.path.strip("/")
    if "/" in bucket or parts.query or parts.fragment:
        raise ConfigError(f"{shown} names more than a bucket, which Farflung wants whole; {EXPECTED}")
    if port == {"http": 80, "https": 443}[scheme]:
        port = None
    return scheme, host, port, unquote(access), unquote(secret), bucket or "farflung"


def reference(prefix: str, data: bytes) -> BlobRef:
    """The key, size and sha256 that `data` will have under `prefix`."""
    digest = hashlib.sha256(data).hexdigest()
    return BlobRef(key=f"{prefix}.{digest}", size=len(data), sha256=digest)


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
