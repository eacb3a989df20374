"""Where do hosts and launcher meet? The address, the token that both must know, the mark of a directory."""

import os
import secrets
from pathlib import Path

from twinhull.errors import TwinhullError

PORT = 7475
TOKEN, TOKEN_FILE = "TWINHULL_TOKEN", "join.token"
MARK = "join.mark"  # in the run directory: who reads the same there sees the same disk


def parsed(place: str) -> tuple[str, int]:
    """Address and port of `ADDRESS[:PORT]`. Raises TwinhullError."""
    address, _, port = place.rpartition(":") if ":" in place else (place, "", str(PORT))
    if not port.isdecimal() or int(port) > 65535:
        raise TwinhullError(f"{place}: the port must be a number up to 65535.", hint="Write ADDRESS:PORT.")
    return address.strip("[]"), int(port)


def given_token(file: Path | None) -> bytes:
    """The token that a host was given, by file or environment. Raises TwinhullError."""
    if file is None:
        if not (said := os.environ.get(TOKEN)):
            raise TwinhullError(
                "joining needs the launcher's token.", hint=f"Give --token-file FILE or set {TOKEN}."
            )
        return said.encode()
    try:
        return file.read_bytes().strip()
    except OSError as error:
        raise TwinhullError(f"the token file {file} cannot be read: {error.strerror or error}.") from error


def own_token(file: Path) -> bytes:
    """The launcher's token: of the environment, else the one that the run has had before, else a new one."""
    if said := os.environ.get(TOKEN):
        return said.encode()
    if not file.exists():
        with open(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as opened_file:  # noqa: PTH123
            opened_file.write(secrets.token_hex(32))
    return file.read_bytes().strip()
