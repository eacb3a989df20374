"""The command line: one function a verb, its docstring is its help; whatever is heavy is imported inside."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Group, Parameter

from twinhull import __version__
from twinhull.errors import TwinhullError

RUN = Group("Run", sort_key=1)
TOOLS = Group("Tools", sort_key=2)

app = App(
    name="twinhull",
    version=__version__,
    help_format="plaintext",  # the markdown reader would cost every help 50 ms
    help="Training and serving as one vessel: each plane stays afloat when the other is gone.",
    result_action="return_value",
)
app["--help"].group = TOOLS
app["--version"].group = TOOLS

SystemFile = Annotated[Path, Parameter(help="The system file.")]
RunOption = Annotated[
    Path | None,
    Parameter(name="--run", help="Run directory; default: .twinhull/NAME beside the file."),
]


@app.command(group=RUN)
def up(
    file: SystemFile,
    *,
    run: RunOption = None,
    only: Annotated[Literal["training", "serving"] | None, Parameter(help="Start one plane alone.")] = None,
    port: Annotated[int, Parameter(help="Port of the gateway on loopback; 0 takes a free one.")] = 7474,
    ranks: Annotated[
        int | None, Parameter(help="Ranks a training job; default: the file's, at most one a core.")
    ] = None,
    workers: Annotated[
        int | None, Parameter(help="Workers a pool; default: the file's, at most one a core.")
    ] = None,
    join_at: Annotated[
        str | None,
        Parameter(help="ADDRESS[:PORT] at which machines join to train; without it this one trains."),
    ] = None,
    plain: Annotated[
        bool, Parameter(help="One log line an event instead of the live view.", negative="")
    ] = False,
    log_format: Annotated[Literal["console", "json"], Parameter(help="How plain lines look.")] = "console",
) -> int:
    """Run the system on this machine: broker, gateway, workers and training under one supervisor.

    Ctrl-C stops everything. Started again in the same run directory it continues where it stopped.
    """
    from twinhull.deploy.local import Options
    from twinhull.deploy.local import up as run_up

    return run_up(
        file,
        Options(
            run=run,
            only=only,
            port=port,
            ranks=ranks,
            workers=workers,
            join_at=join_at,
            plain=plain,
            log_format=log_format,
        ),
    )


@app.command(group=RUN)
def join(
    launcher: Annotated[str, Parameter(help="ADDRESS[:PORT] of the launcher, as its log says it.")],
    *,
    ranks: Annotated[
        int | None, Parameter(help="Ranks on this machine; default: one a GPU, without GPUs one a core.")
    ] = None,
    name: Annotated[str | None, Parameter(help="Of this machine; default: its host name.")] = None,
    token_file: Annotated[
        Path | None, Parameter(help="join.token of the run directory; default: TWINHULL_TOKEN is the token.")
    ] = None,
    code: Annotated[Path, Parameter(help="The directory of your modules.")] = Path(),
) -> int:
    """Train on this machine for a launcher elsewhere, until its run is over.

    A machine that is cut off ends its ranks by itself, and joins again as soon as it can. SIGTERM or Ctrl-C
    says that it is about to go: the run saves and goes on without it.
    """
    from twinhull.train.supervise.join import Options, join

    return join(Options.of(launcher, ranks=ranks, name=name, token_file=token_file, code=code))


@app.command(group=TOOLS)
def check(
    file: SystemFile,
    *,
    format: Annotated[
        Literal["text", "json"], Parameter(help="Text for people, JSON for machines.")
    ] = "text",
) -> int:
    """Check a system file: all its mistakes at once with their places, or one line saying what it is."""
    from twinhull.system.check import check as run_check

    return run_check(file, format)


@app.command(group=TOOLS)
def schema() -> int:
    """Print the JSON Schema of the system file, for editors."""
    from twinhull.system.schema import json_schema

    print(json_schema())
    return 0


@app.command(group=TOOLS)
def init(directory: Annotated[Path, Parameter(help="Where to write; made if missing.")]) -> int:
    """Write a small working system: its file, its code and a test."""
    from twinhull.system.starter import init as run_init

    return run_init(directory)


@app.command(group=TOOLS)
def load(
    url: Annotated[str, Parameter(help="Gateway, for example http://127.0.0.1:7474.")],
    *,
    requests: Annotated[
        Path | None,
        Parameter(help="NDJSON, one request a line: {'path': '/NAME', 'body': {...}}, or bare bodies."),
    ] = None,
    path: Annotated[str | None, Parameter(help="Where bare bodies go, for example /recommend.")] = None,
    body: Annotated[str | None, Parameter(help="One body as JSON text, sent again and again.")] = None,
    rate: Annotated[str, Parameter(help="Requests a second, sent whether answers come or not.")] = "50/s",
    duration: Annotated[str, Parameter(help="How long.")] = "10 s",
    deadline: Annotated[str, Parameter(help="An answer after this is late.")] = "200 ms",
    arrivals: Annotated[
        Literal["poisson", "constant", "file"], Parameter(help="Spacing; file: its 'at' fields.")
    ] = "poisson",
    seed: Annotated[int, Parameter(help="Of the random spacing.")] = 0,
    out: Annotated[Path | None, Parameter(help="Write every request to this file as NDJSON.")] = None,
    format: Annotated[
        Literal["text", "json"], Parameter(help="Text for people, JSON for machines.")
    ] = "text",
) -> int:
    """Send requests open-loop and record each: asked at, answered at, source, version."""
    from twinhull.serve.load import main as run_load

    return run_load(
        url,
        requests=requests,
        path=path,
        body=body,
        rate=rate,
        duration=duration,
        deadline=deadline,
        arrivals=arrivals,
        seed=seed,
        out=out,
        fmt=format,
    )


@app.command(group=TOOLS)
def checkpoints(
    action: Annotated[Literal["ls", "verify", "prune"], Parameter(help="What to do.")],
    file: Annotated[Path | None, Parameter(help="The system file, if --run is not given.")] = None,
    *,
    run: RunOption = None,
    train: Annotated[str | None, Parameter(help="Of this training workload; default: of all.")] = None,
    keep: Annotated[int | None, Parameter(help="How many of the newest prune leaves.")] = None,
    format: Annotated[
        Literal["text", "json"], Parameter(help="Text for people, JSON for machines.")
    ] = "text",
) -> int:
    """List checkpoints, verify them by reading every file, or remove old ones.

    prune never removes the newest that verifies; verify leaves with 1 if one is damaged.
    """
    from twinhull.train.checkpoints.inventory import main as run_checkpoints

    return run_checkpoints(action, file, run=run, train=train, keep=keep, fmt=format)


def main() -> None:
    """Run a verb; leave with its exit code, and with one clear line for whatever a user can mend."""
    try:
        code = app()
    except TwinhullError as error:
        print(f"twinhull: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
