"""The command line. Each command says with an example what it is for; exit codes are those of `broker.errors`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Coroutine
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from rich.console import Console

from broker import faults
from broker.errors import ConfigError, FarflungError
from deploy import config as configuration
from deploy.profile import Connection, find

F = TypeVar("F", bound=Callable[..., Any])

EPILOG = """Exit codes: 0 done, 1 unexpected error, 2 configuration or usage, 3 NATS or S3 not reachable or refusing,
4 an embedded server did not start, 5 the run is held by another learner or cannot be continued, 6 the run failed,
7 the sampled policy was not the recorded one, or a replayed step differs, 8 the object store failed, 9 the broker lost
the run's record (start the learner again: it goes on from the store), 130 or 143 stopped by a signal."""


def _version() -> str:
    try:
        return version("farflung")
    except PackageNotFoundError:
        return "unknown (not installed)"


def connection_options(function: F) -> F:
    """The options by which a command finds broker and store. `profile.find` looks into the environment itself: what
    stands there counts less than a profile that an option names.
    """
    options = [
        click.option("--nats", help="NATS URL: nats://user:password@host:4222. Else FARFLUNG_NATS."),
        click.option("--s3", help="S3 URL: http(s)://ACCESS:SECRET@host:port/bucket. Else FARFLUNG_S3."),
        click.option("--s3-access-key", help="S3 access key, in place of the URL's."),
        click.option("--s3-secret-key", help="S3 secret key, in place of the URL's."),
        click.option("--s3-region", help="S3 region, where the host does not say it. Else FARFLUNG_S3_REGION."),
        click.option(
            "--profile",
            type=click.Path(dir_okay=False),
            help="File with both URLs, as `farflung up` writes it. Else FARFLUNG_PROFILE, or the newest one written.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def branch_options(function: F) -> F:
    """The options by which a new run begins with another run's version, or with an adapter from elsewhere."""
    function = click.option(
        "--adapter",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Begin the run with the PEFT adapter in this directory.",
    )(function)
    function = click.option(
        "--fresh-optimizer", is_flag=True, help="With --from: begin with a fresh optimizer, not the other run's."
    )(function)
    return click.option(
        "--from",
        "origin",
        metavar="RUN[@VERSION]",
        help="Begin the run with a version of another run on the same broker and store. Default version: the newest.",
    )(function)


def telemetry_options(function: F) -> F:
    """The options by which a component says where its traces go."""
    function = click.option("--otlp", default="", help="OTLP/HTTP endpoint for traces and metrics.")(function)
    return click.option(
        "--telemetry",
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory for traces and metrics as files, where there is no --otlp endpoint.",
    )(function)


def _connection(options: dict[str, Any]) -> Connection:
    return find(
        nats=options.pop("nats"),
        s3=options.pop("s3"),
        access_key=options.pop("s3_access_key"),
        secret_key=options.pop("s3_secret_key"),
        region=options.pop("s3_region"),
        profile=options.pop("profile"),
    )


def _check_branch(options: dict[str, Any]) -> None:
    """Refuse what --from cannot mean before anything starts. Raises ConfigError."""
    from learner.branch import Origin

    if options["origin"] is not None and options["adapter"] is not None:
        raise ConfigError("--from and --adapter each say what the run begins with; leave one of them out")
    if options["origin"] is not None:
        Origin.parse(options["origin"])
    elif options["fresh_optimizer"]:
        raise ConfigError("--fresh-optimizer says what not to take over with --from RUN@VERSION; name that too")


def _serve(component: str, id: str, main: Callable[[], Coroutine[Any, Any, int]], options: dict[str, Any]) -> None:
    from deploy import running

    running.end(running.run(component, id, main, telemetry=options["telemetry"], endpoint=options["otlp"]))


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(_version(), prog_name="farflung")
def cli() -> None:
    """Train language models by asynchronous reinforcement learning on machines that share only a network.

    Start with:  farflung up examples/addition.toml
    """


# --------------------------------------------------------------------------------------------------------- one machine


@cli.command()
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dir", "directory", type=click.Path(file_okay=False, path_type=Path), help="Default: runs/RUN")
@click.option("--restart", is_flag=True, help="Begin a new incarnation of the run; the old one is left in the store.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object, as the last line.")
@click.option("--nats", envvar="FARFLUNG_NATS", help="Use this NATS server, not an embedded one.")
@click.option("--s3", envvar="FARFLUNG_S3", help="Use this S3 store, not an embedded one.")
@branch_options
@click.option("--threads-learner", type=int, help="CPU threads of the learner. Default: a fair share of the cores.")
@click.option("--threads-actor", type=int, help="CPU threads of each actor. Default: a fair share of the cores.")
def up(config: Path, directory: Path | None, as_json: bool, **given: Any) -> None:
    """Run a whole training job on this machine: servers, router, actors, learner.

    Ctrl-C stops it; the same command goes on where it stopped.

    Example:  farflung up examples/addition.toml

    Example:  farflung up harder.toml --from addition@12

    Example:  farflung up mine.toml --adapter ./sft-adapter
    """
    from deploy import running
    from deploy.supervisor import Up, UpOptions

    spec = configuration.load(config)
    _check_branch(given)
    directory = directory or Path("runs") / spec.run.name
    options = UpOptions(config, directory.resolve(), **given)
    console = Console(stderr=as_json, highlight=False)
    summary: dict[str, Any] = {}

    async def main() -> int:
        summary.update(await Up(spec, options, console).run())
        return 0

    code = running.run("up", running.node_id("up"), main, level=30)
    if code in running.STOPPED:
        console.print(f"stopped; `farflung up {config}` goes on from here", markup=False, soft_wrap=True)
    if as_json and summary:
        click.echo(json.dumps(summary))
    running.end(code)


# ---------------------------------------------------------------------------------------------------------- components


def _server_command(kind: str, bind: str, port: int, directory: Path) -> None:
    from deploy.processes import hold, write_private
    from deploy.servers import Server, nats_launch, store_launch

    directory = directory.resolve()
    make = nats_launch if kind == "broker" else store_launch
    busy = f"another `farflung {kind}` runs on {directory}; stop it, or choose another --dir"
    with hold(directory / f"{kind}.lock", busy):
        launch = make(directory, bind=bind, port=port, fixed=True)
        server = Server(launch, directory / f"{launch.name}.log")
        server.start()
        write_private(directory / f"{launch.name}.url", launch.url.encode())
        option = "--nats" if kind == "broker" else "--s3"
        click.echo(f"{kind} ready; others reach it with\n  {option} {launch.url}")
        try:
            code = server.wait()
        except KeyboardInterrupt:
            server.stop()
            code = 0
    sys.exit(code)


@cli.command()
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=4222, show_default=True)
@click.option("--dir", "directory", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/servers"))
def broker(bind: str, port: int, directory: Path) -> None:
    """Run the embedded NATS server (JetStream, synced to disk at every write).

    Example:  farflung broker --bind 0.0.0.0
    """
    _server_command("broker", bind, port, directory)


@cli.command()
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=9000, show_default=True)
@click.option("--dir", "directory", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/servers"))
def store(bind: str, port: int, directory: Path) -> None:
    """Run the embedded S3 server on a directory.

    Example:  farflung store --bind 0.0.0.0
    """
    _server_command("store", bind, port, directory)


@cli.command()
@click.option("--fleet", help="The fleet to serve. Default: that of the only run there is.")
@click.option("--http", help="HOST:PORT of an OpenAI-compatible HTTP face.")
@click.option("--model", help="Whose tokenizer the HTTP face uses. Default: the base model of the fleet's runs.")
@click.option(
    "--token", envvar="FARFLUNG_TOKEN", show_envvar=True, default="", help="Bearer token that HTTP clients must show."
)
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    help="URL of a plain vLLM server. With one or several the router stands alone: no broker, no store.",
)
@click.option("--spill", default=16.0, show_default=True, help="Requests that a replica may be ahead; docs/routing.md.")
@click.option("--mirror-mb", default=1024, show_default=True, help="Memory for what replicas have cached, in MB.")
@click.option(
    "--cache-tokens",
    default=262_144,
    show_default=True,
    help="KV cache of an upstream that does not say how large it is, in tokens.",
)
@connection_options
@telemetry_options
def router(fleet: str | None, upstreams: tuple[str, ...], **options: Any) -> None:
    """Run a router: places generation requests on replicas by the prefixes they hold.

    Example:  farflung router --fleet smollm2-135m-instruct --http 127.0.0.1:8000

    Alone:    farflung router --http 127.0.0.1:8000 --upstream http://gpu1:8000 --upstream http://gpu2:8000
    """
    from deploy import components, running

    names = ("http", "model", "token", "spill", "mirror_mb", "cache_tokens")
    chosen = components.RouterOptions(fleet=fleet, upstreams=upstreams, **{name: options.pop(name) for name in names})
    id = running.node_id("router")
    if upstreams:
        _serve("router", id, lambda: components.stand_alone(chosen), options)
    connection = _connection(options)
    _serve("router", id, lambda: components.router(connection, chosen, id), options)


@cli.command()
@click.option("--model", help="Base model: a directory, a hub name, or smollm2-135m-instruct. Default: the run's.")
@click.option("--fleet", help="The fleet to work for. Default: from --model, or that of the only run there is.")
@click.option(
    "--engine",
    type=click.Choice(["embedded", "vllm"]),
    default="embedded",
    show_default=True,
    help="embedded: in this process. vllm: a vLLM server, started and kept alive.",
)
@click.option(
    "--engine-url",
    envvar="FARFLUNG_ENGINE_URL",
    show_envvar=True,
    default="",
    help="Use the vLLM server at this URL, which somebody else runs, after checking that it will do.",
)
@click.option(
    "--engine-key", envvar="FARFLUNG_ENGINE_KEY", show_envvar=True, default="", help="What its --api-key wants."
)
@click.option(
    "--engine-events",
    envvar="FARFLUNG_ENGINE_EVENTS",
    show_envvar=True,
    default="",
    help="Where it publishes KV-cache events (its --kv-events-config): tcp://HOST:PORT",
)
@click.option("--engine-arg", multiple=True, help="A further flag for the vLLM server: --engine-arg=--enforce-eager")
@click.option(
    "--vllm-python",
    envvar="FARFLUNG_VLLM_PYTHON",
    show_envvar=True,
    default="",
    help="The Python that has vLLM. Default: this one.",
)
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16"]))
@click.option("--adapter-slots", type=int, help="Adapters the engine holds at once. Default: what the runs need.")
@click.option("--max-lora-rank", type=int, help="Largest rank a vLLM server takes. Default: what the runs need.")
@click.option("--context", type=int, help="Longest prompt and reply, in tokens. Default: the model's.")
@click.option("--max-inflight", default=64, show_default=True, help="Episodes to run at once.")
@click.option("--cache-tokens", default=16384, show_default=True, help="KV cache for running requests, in tokens.")
@click.option("--threads", type=int, help="CPU threads for the engine. Default: all cores.")
@click.option(
    "--code",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with the runs' rewards and environments. May be given several times.",
)
@click.option("--no-engine", is_flag=True, help="Run episodes only; other actors' replicas generate.")
@connection_options
@telemetry_options
def actor(**options: Any) -> None:
    """Run an actor: runs episodes for every run of its fleet, and hosts one inference engine.

    Example:  farflung actor --model smollm2-135m-instruct --code examples --engine vllm
    """
    from deploy import components, running

    connection = _connection(options)
    id = running.node_id("actor")
    telemetry = {name: options.pop(name) for name in ("telemetry", "otlp")}
    _serve("actor", id, lambda: components.actor(connection, id, components.ActorOptions(**options)), telemetry)


@cli.command()
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--restart", is_flag=True, help="Begin a new incarnation of the run.")
@branch_options
@click.option("--take-over", is_flag=True, help="Displace a learner that is present; it stops and says so.")
@click.option("--threads", type=int, help="CPU threads. Default: all cores.")
@click.option("--dir", "directory", type=click.Path(file_okay=False, path_type=Path), help="For steps.jsonl.")
@click.option(
    "--code",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Further directories with task sources, rewards and environments; CONFIG's own comes first.",
)
@connection_options
@telemetry_options
def learner(config: Path, **options: Any) -> None:
    """Run the learner of a run: issues tasks, trains, commits, activates.

    Example:  farflung learner examples/addition.toml

    Example:  farflung learner harder.toml --from addition@12
    """
    from deploy import components, running

    spec = configuration.load(config)
    _check_branch(options)
    connection = _connection(options)
    id = running.node_id("learner")
    telemetry = {name: options.pop(name) for name in ("telemetry", "otlp")}
    telemetry["otlp"] = telemetry["otlp"] or spec.observability.otlp_endpoint
    roots = [config.resolve().parent, *options.pop("code")]
    _serve(
        "learner",
        id,
        lambda: components.learner(connection, spec, id, components.LearnerOptions(roots=roots, **options)),
        telemetry,
    )


# ------------------------------------------------------------------------------------------------------------- looking


@cli.command("config")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
def show_config(config: Path) -> None:
    """Print a configuration complete: every key with its value, defaults filled in, and its meaning.

    Example:  farflung config examples/addition.toml
    """
    click.echo(configuration.render(configuration.load(config)), nl=False)


def query(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A command that asks broker and store something and ends. Adds the connection options and --dir."""

    @connection_options
    @click.option(
        "--dir",
        "directory",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="A directory of `farflung up`: its servers are asked, and started meanwhile if it is not running.",
    )
    def command(directory: Path | None, **options: Any) -> None:
        from deploy import queries, running

        async def main() -> int:
            async with queries.opened(options, directory) as services:
                await function(services, **options)
            return 0

        running.end(running.run("query", "query", main, level=30))

    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    return command


@cli.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@query
async def status(services: Any, run: str | None, as_json: bool) -> None:
    """Show runs, versions, the ledger, every node, and what the bottleneck is.

    Example:  farflung status addition --json
    """
    from deploy import queries

    await queries.status(services, run, as_json)


@cli.command()
@click.argument("run")
@click.argument("figures", nargs=-1)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Also draw to this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print each step's figures instead, one JSON object a line.")
@query
async def plot(services: Any, run: str, figures: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Draw a run's FIGURES by step, from the commits in the store; without FIGURES, the usual ones.

    Example:  farflung plot addition reward k3 --out addition.png
    """
    from deploy import queries

    await queries.plot(services, run, figures, out, as_json)


@cli.command("eval")
@click.argument("version", metavar="RUN[@VERSION]")
@click.argument("tasks")
@click.option("--samples", type=click.IntRange(min=1), help="Completions per task. Default: the run's, or 1.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many tasks.")
@click.option("--split", help="Which split of a dataset directory. Default: the run's, or test.")
@click.option("--success", type=float, help="Rewards from here on count as a success in pass@k. Default: the run's.")
@click.option("--temperature", type=click.FloatRange(0, 10), help="0 is greedy. Default: the run's.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Default: the run's, or 1.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="The longest reply. Default: the run's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@query
async def evaluate(services: Any, version: str, tasks: str, as_json: bool, **chosen: Any) -> None:
    """Evaluate a version of a run on TASKS (what tasks.source may be), on the fleet that is up.

    Works for any version whose adapter is in the store, also of a run that is over; 0 is the base model. The fleet's
    replicas load exactly that version meanwhile, its actors attempt the tasks. Exit code 6 without a result.

    Example:  farflung eval addition@12 held-out.jsonl --samples 8
    """
    from deploy import evaluating

    await evaluating.evaluate(services, version, tasks, chosen, as_json)


@cli.group()
def runs() -> None:
    """List, pause, resume, stop, replay or delete runs."""


@runs.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@query
async def runs_list(services: Any, as_json: bool) -> None:
    """List every run.

    Example:  farflung runs list
    """
    from deploy import queries

    await queries.runs_list(services, as_json)


def _control(wanted: Literal["run", "pause", "stop"], text: str) -> None:
    @runs.command("resume" if wanted == "run" else wanted, help=text)
    @click.argument("run")
    @query
    async def command(services: Any, run: str) -> None:
        from deploy import queries

        await queries.control(services, run, wanted)


_control(
    "pause", "Issue no more tasks and make no more steps; keep everything.\n\nExample:  farflung runs pause addition"
)
_control("run", "Go on with a paused or stopped run.\n\nExample:  farflung runs resume addition")
_control("stop", "Stop the learner after its step; it resumes later.\n\nExample:  farflung runs stop addition")


@runs.command("replay")
@click.argument("run")
@click.option("--model", help="The run's base model: a directory, a hub name, or smollm2-135m-instruct.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@query
async def runs_replay(services: Any, run: str, model: str | None, as_json: bool) -> None:
    """Train a run's recorded groups again and compare every step's weights, bit for bit.

    Exit code 7 when a step differs; 8 when commits or groups that it needs were swept.

    Example:  farflung runs replay addition
    """
    from deploy import queries

    await queries.replay(services, run, model, as_json)


@runs.command("delete")
@click.argument("run")
@click.option("--yes", is_flag=True, help="Do not ask.")
@query
async def runs_delete(services: Any, run: str, yes: bool) -> None:
    """Stop a run and remove its records, messages and objects for good.

    Example:  farflung runs delete addition --yes
    """
    from deploy import queries

    if not yes:
        click.confirm(f"remove run {run} with its adapters and trajectories?", abort=True)
    await queries.delete(services, run)


@cli.group()
def adapters() -> None:
    """List a run's versions, or fetch one."""


@adapters.command("list")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@query
async def adapters_list(services: Any, run: str, as_json: bool) -> None:
    """List the versions of a run.

    Example:  farflung adapters list addition
    """
    from deploy import queries

    await queries.adapters_list(services, run, as_json)


@adapters.command("pull")
@click.argument("run")
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option("--version", "number", type=int, help="Default: the newest.")
@click.option("--merge", is_flag=True, help="Merge it into the base model and write a plain model.")
@query
async def adapters_pull(services: Any, run: str, target: Path, number: int | None, merge: bool) -> None:
    """Fetch an adapter as a directory that PeftModel.from_pretrained loads.

    Example:  farflung adapters pull addition ./addition-adapter
    """
    from deploy import queries

    await queries.adapters_pull(services, run, target, number, merge)


@cli.group()
def trajectories() -> None:
    """Look at stored episodes."""


@trajectories.command("list")
@click.argument("run")
@click.option("--limit", default=20, show_default=True, help="Newest groups to list.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@query
async def trajectories_list(services: Any, run: str, limit: int, as_json: bool) -> None:
    """List the stored groups of a run, newest first.

    Example:  farflung trajectories list addition
    """
    from deploy import queries

    await queries.trajectories_list(services, run, limit, as_json)


@trajectories.command("show")
@click.argument("run")
@click.argument("group", required=False)
@click.option("--tokens", is_flag=True, help="Also show each token with its id, logprob and version.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@query
async def trajectories_show(services: Any, run: str, group: str | None, tokens: bool, as_json: bool) -> None:
    """Show the episodes of one group (default: the newest): text and rewards; with --tokens ids, logprobs, versions.

    Example:  farflung trajectories show addition addition-1a2b3c4d-00000007 --tokens
    """
    from deploy import queries

    await queries.trajectories_show(services, run, group, tokens, as_json)


def main() -> None:
    """The entry point: errors of ours become one line and their exit code."""
    try:
        faults.from_environment(os.environ)
        cli(standalone_mode=True)
    except FarflungError as error:
        click.echo(f"farflung: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
