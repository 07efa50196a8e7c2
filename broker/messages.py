"""Every message that travels between components: its fields, and how it becomes bytes.

On the wire a message is one msgpack map with two extra keys: `schema`, the version of this file's contract, and
`kind`, which message it is. A receiver checks both and every field's type before it believes anything; whatever
does not fit raises MalformedMessage, and the receiver dead-letters it. Arrays travel as raw little-endian bytes
(int32 token ids, float32 logprobs): fifty times cheaper than msgpack lists.

Fields that are unknown are ignored, so that a newer sender may add some; a change of meaning raises SCHEMA.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import msgpack
import msgspec
import numpy as np
import numpy.typing as npt

from broker.errors import MalformedMessage

SCHEMA: Final = 1

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def pack_ids(ids: npt.ArrayLike) -> bytes:
    """Token ids as raw little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def pack_floats(values: npt.ArrayLike) -> bytes:
    """Numbers as raw little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_ids(data: bytes) -> Ids:
    """The reverse of pack_ids. Raises MalformedMessage when the length is no multiple of four."""
    if len(data) % 4:
        raise MalformedMessage(f"expected raw int32 token ids (a multiple of 4 bytes), got {len(data)} bytes")
    return np.frombuffer(data, dtype="<i4")


def unpack_floats(data: bytes) -> Floats:
    """The reverse of pack_floats. Raises MalformedMessage when the length is no multiple of four."""
    if len(data) % 4:
        raise MalformedMessage(f"expected raw float32 numbers (a multiple of 4 bytes), got {len(data)} bytes")
    return np.frombuffer(data, dtype="<f4")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The base of everything that is sent. Subclasses name their kind."""

    def encode(self) -> bytes:
        body = msgspec.to_builtins(self, builtin_types=(bytes,))
        body["schema"] = SCHEMA
        packed: bytes = msgpack.packb(body, use_bin_type=True)
        return packed


M = TypeVar("M", bound=Message)


def decode(data: bytes, kind: type[M]) -> M:
    """Decode `data` as a message of `kind`. Raises MalformedMessage with what was expected and what came."""
    return _convert(_unpack(data), kind, kind.__name__)


def decode_one_of(data: bytes, *kinds: type[M]) -> M:
    """Decode `data` as whichever of `kinds` it says it is. Raises MalformedMessage."""
    body = _unpack(data)
    by_tag = {str(kind.__struct_config__.tag): kind for kind in kinds}
    kind = by_tag.get(str(body.get("kind")))
    if kind is None:
        raise MalformedMessage(f"expected a message of kind {' or '.join(by_tag)}, got {body.get('kind')!r}")
    return _convert(body, kind, kind.__name__)


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:
        raise MalformedMessage(f"not msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(body, dict):
        raise MalformedMessage(f"expected a msgpack map, got {type(body).__name__}")
    if body.get("schema") != SCHEMA:
        raise MalformedMessage(f"expected schema {SCHEMA}, got {body.get('schema')!r}; run the same release everywhere")
    return body


def _convert(body: dict[str, Any], kind: type[M], name: str) -> M:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"not a valid {name}: {error}") from error


# ---------------------------------------------------------------------------------------------------- tasks, groups


class Task(Message, frozen=True, kw_only=True, tag="task"):
    """One prompt, or one environment start, to be attempted `group_size` times. Learner to actor."""

    run: Name
    incarnation: Name
    group: Name
    """The id of the group that answers it."""
    index: Count
    """The task's place in the run's order; decides `columns` and `seed`."""
    columns: dict[str, Any]
    """The task source's row: `prompt` and whatever the reward wants."""
    group_size: Annotated[int, msgspec.Meta(ge=1)]
    seed: int
    active: Count = 0
    """The version that was active when it was issued. The credit counted on it, so no older one may serve the group."""


class GroupReady(Message, frozen=True, kw_only=True, tag="group_ready"):
    """A finished group lies in the store. Actor to learner: a claim check, not the data."""

    run: Name
    incarnation: Name
    group: Name
    index: Count
    version: Count
    adapter: str | None
    key: Name
    size: Count
    sha256: Sha256
    rewards: list[float]
    lengths: list[int]
    """Sampled tokens of each episode."""
    seconds: dict[str, float]
    """Where the group's time went, by the actor's clock: lease, generate, environment, reward, store."""
    actor: Name

    @property
    def blob(self) -> BlobRef:
        """The object that holds the group."""
        return BlobRef(key=self.key, size=self.size, sha256=self.sha256)


FailureKind = Literal["environment", "reward", "generation", "timeout", "stale", "task"]


class GroupFailed(Message, frozen=True, kw_only=True, tag="group_failed"):
    """An actor could not finish a group, or its version fell behind (`stale`) while it ran. Actor to learner."""

    run: Name
    incarnation: Name
    group: Name
    index: Count
    version: Count
    failure: FailureKind
    reason: str
    lengths: list[int]
    seconds: dict[str, float]
    actor: Name


EVALUATION_SHARE: Final = 4
"""Evaluations have this part of an actor's `max_inflight`, beside the episodes that training has: a quarter, rounded
down to whole tasks, and one task at least. Neither waits for the other's slots; engines serve both in turn."""


class EvaluationTask(Message, frozen=True, kw_only=True, tag="evaluation_task"):
    """One held-out task, to be attempted `samples` times under exactly one version. Evaluator to actor, asked again
    under the same id while no answer comes."""

    id: Name
    evaluator: Name
    """The node that asks. When its presence fades, nobody waits for the answer any more."""
    run: Name
    incarnation: Name
    index: Count
    """The task's place in its source; decides `columns` and `seed`."""
    columns: dict[str, Any]
    samples: Annotated[int, msgspec.Meta(ge=1)]
    seed: int
    version: Count
    adapter: str | None
    """The adapter that must serve every token; None: the base model."""
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)]


class EvaluationAnswer(Message, frozen=True, kw_only=True, tag="evaluation_answer"):
    """What became of an evaluation's task. Actor to evaluator.

    Either `rewards`, one for each of its samples, or why there are none: `refused`, this actor cannot run it (another
    may); `failure`, it was run and not all of its samples came to a reward.
    """

    id: Name
    actor: Name
    rewards: list[float] = []
    lengths: list[int] = []
    """Sampled tokens of each sample, every one of them served by the version that was asked for."""
    truncated: Count = 0
    """Samples that a token or turn limit cut."""
    refused: str = ""
    failure: str = ""


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead_letter"):
    """A message that a component could not use, kept for a person to look at."""

    subject: str
    reason: str
    component: str
    payload: bytes


# ------------------------------------------------------------------------------------------------------- generation


class GenerateRequest(Message, frozen=True, kw_only=True, tag="generate"):
    """Sample one continuation. Actor to router to replica; the reply goes straight to the asker's inbox."""

    id: Name
    """Unique per request. The asker takes the first answer to it."""
    run: str
    group: str
    siblings: Annotated[int, msgspec.Meta(ge=1)]
    """How many requests of this group are to be expected in all, this one included."""
    adapter: str | None
    version: Count
    prompt: bytes
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)]
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    stop_token_ids: list[int]
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    work: float = 0.0
    """Written by the router that placed it: what it adds to its replica's load, in prefilled tokens."""
    reserved: float = 0.0
    """Written by the router: the work of those of its group that are still to come."""


class GenerateReply(Message, frozen=True, kw_only=True, tag="generated"):
    """What a replica sampled. `adapter` and `version` are what really served it."""

    id: Name
    replica: Name
    token_ids: bytes
    logprobs: bytes
    finish: Literal["stop", "length", "cancelled"]
    adapter: str | None
    version: Count
    cached_tokens: Count
    seconds: float


class GenerateRefused(Message, frozen=True, kw_only=True, tag="refused"):
    """No continuation, and why. Not retryable: the same request can never succeed."""

    id: Name
    code: Literal["unavailable", "prompt_too_long", "invalid", "failed"]
    reason: str
    retryable: bool
    source: str


class CancelRequest(Message, frozen=True, kw_only=True, tag="cancel"):
    """The asker no longer wants the answer to `id`."""

    id: Name


class Completion(msgspec.Struct, frozen=True):
    """One request that a replica has ended."""

    id: str
    ok: bool
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    blocks: bytes = b""
    """Hashes of the full blocks its continuation added to the replica's cache (`broker.blocks.chain`)."""
    fault: bool = False
    """It failed, and the replica is to blame, not the request."""


class CacheEvent(msgspec.Struct, frozen=True):
    """What an engine said of its prefix cache.

    `stored`: it holds the chain `blocks` of `adapter`, complete from a prompt's first block on. `removed`: it no longer
    holds these blocks, each named by its own hash. `cleared`: it holds nothing.
    """

    change: Literal["stored", "removed", "cleared"]
    adapter: str | None = None
    blocks: bytes = b""
    """Hashes as of `broker.blocks.chain`."""
    salt: str = ""


class ReplicaLoad(Message, frozen=True, kw_only=True, tag="load"):
    """A replica's load. Replica to routers, every half second and at each completion."""

    replica: Name
    running: Count
    waiting: Count
    unfinished: list[str]
    """The ids of every request it has accepted and not ended: load can always be rebuilt from them."""
    completed: list[Completion]
    beat: Count
    """Counts up, so that a reader can tell an old report from a new one."""
    work: list[float] = []
    """What each of `unfinished` adds to its load, as the router that placed it wrote; empty where none wrote it."""
    reserved: dict[str, float] = {}
    """The work of members that are still to come, of each group of which it has some."""
    cache: list[CacheEvent] = []
    """What its engine published of its prefix cache since the last report, in order."""


class RouterBeat(Message, frozen=True, kw_only=True, tag="router_beat"):
    """A router takes requests. Router to routers, every half second: they share the groups among them."""

    id: Name
    leaving: bool = False


# --------------------------------------------------------------------------------------------------------- registry


class BlobRef(msgspec.Struct, frozen=True):
    """An object in the store and what it must hash to."""

    key: str
    size: int
    sha256: str


class AdapterRef(msgspec.Struct, frozen=True):
    """Where the adapter of one version lies and what it must hash to."""

    version: int
    name: str
    key: str
    size: int
    sha256: str

    @property
    def blob(self) -> BlobRef:
        """The object that holds it."""
        return BlobRef(key=self.key, size=self.size, sha256=self.sha256)


class ProbeRef(msgspec.Struct, frozen=True):
    """How a replica proves that it computes what the learner computes (`broker.probe`)."""

    adapter: AdapterRef
    """Large random weights in the shape of the run's adapter; never trained, never served."""
    expected: BlobRef
    """A `broker.probe.Probe`: what the learner computes under it and under the base model."""


RunState = Literal["running", "stopped", "finished", "failed"]


class Head(Message, frozen=True, kw_only=True, tag="head"):
    """The head record of a run: the only thing whose compare-and-set decides what happened.

    Written by the run's learner alone, under its epoch.
    """

    run: Name
    fleet: Name
    incarnation: Name
    epoch: Count
    learner: str
    """The node id of the learner of this epoch; empty when it left on purpose."""
    step: Count
    head: Count
    active: Count
    max_staleness: Count
    state: RunState
    detail: str = ""
    first: Count = 0
    """The version the run began with: 0, the base model, or 1 when it was branched from another run's version. None
    before it is ever sampled from, so nothing is issued while `active` is below it."""
    origin: str = ""
    """What the run was branched from, as `run@version`; empty when it began on the base model."""
    adapter: AdapterRef | None = None
    """The adapter of `head`; None while head is the base model."""
    live: list[AdapterRef] = []
    """The versions that replicas keep loaded, oldest first; version 0 needs no slot."""
    checkpoint: BlobRef | None = None
    """Optimizer, RNG, cursor and ledger as of `step`."""
    spec: dict[str, Any] = {}
    """The run's configuration, so that an actor needs no file."""
    code: dict[str, str] = {}
    """Source hashes of the user's code this run was created with, by name."""
    model: str = ""
    """The fingerprint of the base model."""
    summary: dict[str, float] = {}
    """Figures of the last step, for whoever looks from outside."""
    probe: ProbeRef | None = None
    """What a replica must prove before it serves this run; None: nothing, until the learner has made it."""

    @property
    def adapter_slots(self) -> int:
        """Adapter slots that the run needs on every replica, as `RunSpec.adapter_slots` counts them."""
        return self.max_staleness + 2 + int(self.spec.get("fleet", {}).get("eval_slots") or 0)


class VersionRecord(Message, frozen=True, kw_only=True, tag="version"):
    """One version of a run. Offered before its commit, so that replicas can load it early."""

    run: Name
    incarnation: Name
    epoch: Count
    adapter: AdapterRef
    step: Count
    checkpoint: BlobRef | None = None
    state: Literal["offered", "committed", "failed"] = "offered"
    detail: str = ""
    reward: float | None = None
    """Mean reward of the step that made it."""
    trace: dict[str, str] = {}
    """The `traceparent` of the step that made it: loading it is part of that trace."""


class Control(Message, frozen=True, kw_only=True, tag="control"):
    """What a person wants of a run. Written by the command line, read by the learner."""

    run: Name
    wanted: Literal["run", "pause", "stop", "delete"]


NodeKind = Literal["learner", "actor", "replica", "router", "evaluator"]


class Node(Message, frozen=True, kw_only=True, tag="node"):
    """The presence of one component. Put at least every five seconds; the broker forgets it after fifteen."""

    id: Name
    node: NodeKind
    fleet: Name
    host: str
    pid: Count
    state: Literal["joining", "ready", "draining", "failed"]
    detail: str = ""
    run: str = ""
    """The run a learner owns, or an evaluator looks at."""
    model: str = ""
    """The fingerprint of the base model a replica serves."""
    confirmed: list[str] = []
    """Adapter names a replica has loaded and verified."""
    refused: dict[str, str] = {}
    """Adapter names a replica failed to load, with the reason."""
    slots: Count = 0
    """Adapters a replica can hold at once."""
    max_rank: Count = 0
    """The largest LoRA rank it takes; 0: any."""
    capacity: Count = 0
    """Requests a replica runs at once; episodes an actor runs at once."""
    context: Count = 0
    cache_tokens: Count = 0
    block: Count = 16
    """Tokens in a block of a replica's prefix cache."""
    code: dict[str, str] = {}
    """Source hashes of the user's code an actor has, by name."""
    pins: list[AdapterRef] = []
    """Versions under evaluation: replicas of the fleet keep them loaded while the node is present."""
    gauges: dict[str, float] = {}
    """Readings for people and for the diagnosis, by metric name."""
