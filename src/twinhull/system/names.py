"""Which names are allowed, and which names Twinhull gives to what it brings by itself."""

import re

from twinhull.units import quoted

# Names become file names, keys and parts of an address, so they are kept to what is safe in all of them.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
MOST_LETTERS = 63
MOST_LETTERS_OF_POOL = 50  # its name becomes the beginning of others
_WORD = r"[^\W\d]\w*"
_ENTRY = re.compile(rf"{_WORD}(?:\.{_WORD})*:{_WORD}")

BROKER, CACHE, GATEWAY, CLIENTS = "broker", "cache", "gateway", "clients"
REGISTRY, CHECKPOINTS = "registry", "checkpoints"
RESERVED_ENDPOINTS = ("events", "health", "metrics")  # the gateway answers these itself


def queue_of(pool: str) -> str:
    """The queue from which the workers of a pool take their calls."""
    return f"{pool}-queue"


def worker_of(pool: str) -> str:
    """The worker processes of a pool."""
    return f"{pool}-worker"


def name_problem(name: str, most: int = MOST_LETTERS) -> str:
    """Why this cannot be a name; empty when it can."""
    if not name:
        return "a name is missing here"
    if len(name) > most:
        return f"{quoted(name)} is too long for a name; use at most {most} characters"
    if _NAME.fullmatch(name):
        return ""
    return f"{quoted(name)} is not a name; use letters a-z, digits, - and _, and start with a letter or digit"


def is_entry(text: str) -> bool:
    """Whether a text is spelled `module:function`."""
    return len(text) <= 200 and _ENTRY.fullmatch(text) is not None


def entry_point(value: object) -> str:
    """A function of the user's, as `module:function`. Raises ValueError with the way out; imports nothing."""
    if isinstance(value, str) and is_entry(value):
        return value
    text = value if isinstance(value, str) else ""
    stem = text.removesuffix(".py").replace("/", ".").replace(".py:", ":")
    if is_entry(stem):
        raise ValueError(f'{quoted(value)} is not module:function; write "{stem}"')
    module, dot, function = stem.rpartition(".")
    if dot and is_entry(f"{module}:{function}") and ":" not in stem:
        raise ValueError(f'{quoted(value)} is not module:function; write "{module}:{function}"')
    raise ValueError(f"{quoted(value)} is not module:function; write for example app:fit")
