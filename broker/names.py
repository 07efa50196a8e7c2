"""Every name on the broker and in the store, in one place."""

from __future__ import annotations

RUNS_BUCKET = "runs"
"""KV: `{run}` head record, `{run}.v.{version}` version records, `{run}.control` what a person wants."""

NODES_BUCKET = "nodes"
"""KV with a time to live: the presence of every component."""

DEAD_STREAM = "DEAD"
DEAD_SUBJECTS = "dead.>"


def tasks_stream(run: str) -> str:
    return f"TASKS_{run}"


def groups_stream(run: str) -> str:
    return f"GROUPS_{run}"


def task_subject(run: str, group: str, epoch: int = 1) -> str:
    """Where the learner of an epoch publishes a group's task: the stream takes the newest epoch's only."""
    return f"tasks.{run}.{epoch}.{group}"


def group_subject(run: str, group: str) -> str:
    return f"groups.{run}.{group}"


def group_at(subject: str) -> str:
    """The group that a task's or an answer's subject names."""
    return subject.rsplit(".", 1)[-1]


def dead_subject(component: str) -> str:
    return f"dead.{component}"


ACTORS_CONSUMER = "actors"


def given_up_subject(run: str) -> str:
    """Where the broker says that it will deliver a task no more: its deliveries are used up."""
    return f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{tasks_stream(run)}.{ACTORS_CONSUMER}"


def learner_consumer(run: str, incarnation: str, epoch: int) -> str:
    return f"learner-{run}-{incarnation}-e{epoch}"


def consumer_epoch(consumer: str) -> int:
    """The epoch that the name of a learner's consumer holds, 0 for any other name."""
    epoch = consumer.rpartition("-e")[2]
    return int(epoch) if epoch.isdecimal() else 0


def generate_subject(fleet: str) -> str:
    """Generation requests: routers share it as a queue group."""
    return f"generate.{fleet}"


def router_generate(router: str) -> str:
    """Requests of the groups that are this router's, handed on by the others."""
    return f"router.{router}.generate"


def routers_subject(fleet: str) -> str:
    """Where routers tell each other that they are there."""
    return f"routers.{fleet}"


def replica_generate(replica: str) -> str:
    return f"replica.{replica}.generate"


def actor_evaluate(actor: str) -> str:
    """Where an actor takes tasks of evaluations; it answers to the asker's inbox."""
    return f"actor.{actor}.evaluate"


def replica_cancel(replica: str) -> str:
    return f"replica.{replica}.cancel"


def cancel_subject(fleet: str) -> str:
    """Cancellations: every router hears them and passes them on to whom it sent the request."""
    return f"cancel.{fleet}"


def load_subject(fleet: str) -> str:
    return f"load.{fleet}"


def head_key(run: str) -> str:
    return run


def version_key(run: str, version: int) -> str:
    return f"{run}.v.{version:06d}"


def version_keys(run: str) -> str:
    """The pattern of all of a run's version keys."""
    return f"{run}.v.*"


def control_key(run: str) -> str:
    return f"{run}.control"


def group_stem(run: str, incarnation: str) -> str:
    """What the ids of an incarnation's groups begin with."""
    return f"{run}-{incarnation}-"


def group_id(run: str, incarnation: str, index: int) -> str:
    return f"{group_stem(run, incarnation)}{index:08d}"


def adapter_name(run: str, version: int, sha256: str) -> str:
    """The name under which engines know an adapter: the same name always means the same bytes."""
    return f"{run}-v{version:06d}-{sha256[:8]}"


def probe_name(run: str, sha256: str) -> str:
    """The name under which engines know a run's probe adapter."""
    return f"{run}-probe-{sha256[:8]}"


def run_prefix(run: str, incarnation: str) -> str:
    """Where everything of one incarnation lies in the store."""
    return f"runs/{run}/{incarnation}"


def history_prefix(run: str) -> str:
    """Where the store keeps copies of a run's head record, over all its incarnations."""
    return f"runs/{run}/history"


def group_prefix(run: str, incarnation: str, group: str) -> str:
    return f"{run_prefix(run, incarnation)}/groups/{group}"


def group_of(key: str) -> str:
    """The group whose blob lies under `key` (`.../groups/{group}.{sha256}`)."""
    return key.rpartition("/")[2].partition(".")[0]


def adapter_prefix(run: str, incarnation: str, version: int) -> str:
    return f"{run_prefix(run, incarnation)}/adapters/{version:06d}"


def probe_prefix(run: str, incarnation: str) -> str:
    return f"{run_prefix(run, incarnation)}/probe"


def evaluation_prefix(run: str, incarnation: str, version: int) -> str:
    """Where the result of a version's evaluation lies."""
    return f"{run_prefix(run, incarnation)}/evaluations/{version:06d}"


def checkpoint_prefix(run: str, incarnation: str, step: int) -> str:
    return f"{run_prefix(run, incarnation)}/checkpoints/{step:06d}"
