"""Every error that Farflung raises on purpose, in one hierarchy.

A message says what was expected, what came, and what to do about it. `exit_code` is what the command line ends
with when the error reaches it, so that scripts can tell the cases apart.
"""

from __future__ import annotations


class FarflungError(Exception):
    """The root: whatever Farflung itself refuses or gives up on."""

    exit_code = 1


class ConfigError(FarflungError):
    """The configuration, a command-line option or the user's code cannot be used as given.

    Raised before anything starts. The message names the key's path, what was expected and what to write instead.
    """

    exit_code = 2


class ModelError(ConfigError):
    """The base model is missing, is no causal language model, or lacks what the run needs (a chat template)."""


class TaskSourceError(ConfigError):
    """The task source is missing, empty, or holds a task that cannot be run."""


class UserCodeError(ConfigError):
    """A reward, environment or task source of the user's cannot be found, imported or called."""


class ConnectionFailed(FarflungError):
    """NATS or S3 could not be reached, or refused the credentials, within the bounded number of tries."""

    exit_code = 3


class ServerError(FarflungError):
    """A server that Farflung runs could not be started (port in use, program missing, disk full, too little memory)."""

    exit_code = 4


class RunConflict(FarflungError):
    """Another learner holds the run, or the run's recorded state contradicts the configuration."""

    exit_code = 5


class Fenced(RunConflict):
    """This learner was displaced: the run's epoch has moved on, so nothing it does counts any more."""


class BrokerLost(Fenced):
    """The broker no longer has the run's record, and nobody deleted the run: the broker's data are gone.

    Not the end of the run: a learner that starts now goes on from the copies in the store.
    """

    exit_code = 9


class RunFailed(FarflungError):
    """The run cannot go on: group after group failed, or nothing is left to train on."""

    exit_code = 6


class EvaluationFailed(RunFailed):
    """An evaluation has no result: no replica serves the version, no actor takes its tasks, or every task failed."""


class PolicyMismatch(RunFailed):
    """The policy that was sampled is not the policy that was recorded: the truth check failed."""

    exit_code = 7


class ReplayMismatch(FarflungError):
    """A committed step is not what its recorded groups make, or a group was trained on twice."""

    exit_code = 7


class StoreError(FarflungError):
    """The object store refused or lost something."""

    exit_code = 8


class ObjectMissing(StoreError):
    """No object lies under this key."""


class ObjectCorrupt(StoreError):
    """The object's bytes do not have the recorded size or sha256."""


class RegistryConflict(FarflungError):
    """A compare-and-set lost: somebody wrote the key since it was read."""


class MalformedMessage(FarflungError):
    """A message does not follow the schema. It is dead-lettered with this reason, never retried."""


class GenerationError(FarflungError):
    """No replica could answer a generation request in time. `retryable` tells whether trying again can help."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class PromptTooLong(GenerationError):
    """The prompt does not fit into the model's context. Retrying cannot help."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class AdapterNotLoaded(GenerationError):
    """The engine was asked for an adapter that it does not hold."""


class NotProven(GenerationError):
    """The replica has not proven that it computes what the run's learner computes. Another replica may have.

    No fault of the replica's: it goes on serving the runs for which it has.
    """


class AdapterError(FarflungError):
    """An adapter cannot be loaded: files missing, wrong shapes, or no slot left."""


class EngineError(FarflungError):
    """The inference engine cannot be asked now, or its answer makes no sense: it died, hangs, or is being restarted.

    The same call may succeed later.
    """


class EpisodeFailed(FarflungError):
    """One episode failed (environment error, reward error, time-out). It fails at most its group."""
