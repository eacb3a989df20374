"""What can the user still mend before anything is started? Modules, extras, the port, the broker."""

import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twinhull.deploy.children import Place, Plane
from twinhull.errors import TwinhullError, UserCodeError
from twinhull.rundir import write_whole

_IMPORT_LIMIT_S = 120.0  # importing PyTorch from a cold disk takes tens of seconds
_BACKLOG = 1024  # connections that wait while the gateway restarts


def need_torch(training: Mapping[str, object]) -> None:
    """Raise if something is to be trained and PyTorch is not installed; PyTorch itself is not imported."""
    if training and importlib.util.find_spec("torch") is None:
        raise TwinhullError(
            f"training {', '.join(sorted(training))} needs PyTorch, which is not installed.",
            hint="pip install 'twinhull[train]', or run the other plane with --only serving.",
        )


def import_functions(functions: Mapping[Plane, list[str]], at: Place) -> None:
    """Import the user's functions, each plane in a process of its own, and note what those of serving take.

    Raises UserCodeError with the user's own place if a module or a function cannot be had.
    """
    with ThreadPoolExecutor() as pool:
        done = {plane: pool.submit(_describe, names, at) for plane, names in functions.items() if names}
        found = {plane: future.result() for plane, future in done.items()}
    if "serving" in functions:
        write_whole(at.run.entries, json.dumps(found.get("serving", {}), indent=1))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for the gateway to inherit: while a gateway restarts, callers wait in its queue."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise TwinhullError(
            f"the gateway cannot listen on {host}:{port}: {reason}.",
            hint="Choose another with --port N; --port 0 takes a free one.",
        ) from error
    listener.set_inheritable(True)
    return listener


def _describe(names: list[str], at: Place) -> dict[str, Any]:  # Any: what serve.entry says of a function
    command = [sys.executable, "-m", "twinhull.serve.entry", "--run", str(at.run.root), *names]
    try:
        done = subprocess.run(
            command, env=at.env, cwd=at.code, capture_output=True, timeout=_IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserCodeError(
            f"importing {', '.join(names)} took longer than {_IMPORT_LIMIT_S:.0f} s.",
            hint="Move slow work from the module's top into its functions.",
        ) from error
    last = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        said = json.loads(last)
    except ValueError:
        tail = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserCodeError(
            f"importing {', '.join(names)} ended with exit code {done.returncode}: {tail or 'no message'}."
        ) from None
    if "error" in said:
        raise UserCodeError(said["error"], hint=said.get("hint", ""))
    return said
