"""What shall be done now? Every decision of the vessel as a pure function on plain numbers.

Plain numbers in, a number or a tuple of numbers out: no clock, no randomness, no I/O, no objects and no
exceptions; never is `inf`, none is `-1`. Decisions are instants, not waits. State lives with the caller.
The gateway calls these with real readings; a simulator may compile the same functions.
"""

from math import inf, sqrt
from typing import Final

FRESH: Final = 0
CACHED: Final = 1
DEFAULT: Final = 2
FAILED: Final = 3

YOUNG: Final = 0  # a cached answer within its time to live
STALE: Final = 1  # older, still better than none
GONE: Final = 2  # too old, or not there

CLOSED: Final = 0  # the breaker lets everything through
OPEN: Final = 1  # it lets one probe through each cool-down


def give_up_at(asked_at: float, deadline_s: float, reserve_s: float, reserve_share: float) -> float:
    """When a request stops waiting for a fresh answer, so that another still leaves before its deadline."""
    return asked_at + deadline_s - min(reserve_s, reserve_share * deadline_s)


def prepare_at(asked_at: float, deadline_s: float, share: float) -> float:
    """When the default of a request that still waits is made ready, so that it is there if it is needed."""
    return asked_at + share * deadline_s


def is_expired(now: float, deadline: float) -> bool:
    """Whether nobody waits any longer for work with this deadline."""
    return now > deadline


def admits(now: float, ahead: float, drain_rate: float, give_up: float) -> bool:
    """Whether a request that finds `ahead` rows before it can hope for an answer by `give_up`.

    `drain_rate` is in rows a second, 0.0 while nothing is known of it. With nothing ahead it is let in
    whatever the rate, so that a rate measured in bad times is measured again.
    """
    if ahead <= 0.0 or drain_rate <= 0.0:
        return now <= give_up
    return now + ahead / drain_rate <= give_up


def flush_at(waiting: int, batch: int, in_flight: int, oldest_at: float, window_s: float) -> float:
    """When the next batch leaves: at once (-inf) if full or if nothing is under way.

    Else when its oldest member has waited long enough.
    """
    if waiting >= batch or in_flight == 0:
        return -inf
    return oldest_at + window_s


def learn_rate(rate: float, rows: float, busy_s: float, saturated: bool, weight: float) -> float:
    """The drain rate (rows/s) after `rows` came back within `busy_s`.

    Of a plane that was not saturated such a reading only says how much it can do at least.
    """
    seen = rows / busy_s if busy_s > 0.0 else 0.0
    if seen <= 0.0:
        return rate
    if not saturated or rate <= 0.0:
        return max(rate, seen)
    return rate + weight * (seen - rate)


def may_retry(attempt: int, retries: float, retried: float, asked: float, budget: float) -> bool:
    """Whether a failed try is repeated: within its own count, all retries within their share of requests."""
    return attempt < retries and retried < budget * asked


def retry_at(now: float, attempt: int, base_s: float, cap_s: float, u: float) -> float:
    """When the next try starts; `u` is a uniform draw, so that retries do not come all at the same time."""
    return now + u * min(cap_s, base_s * 2.0**attempt)


def breaker_allows(state: int, opened_at: float, now: float, cool_down_s: float) -> bool:
    """Whether a request may be sent: always while closed, once a cool-down while open."""
    return state == CLOSED or now >= opened_at + cool_down_s


def breaker_asks(state: int, opened_at: float, now: float) -> float:
    """The start of the cool-down after a request was sent.

    A probe starts it anew, heard of again or not: a lost one would otherwise keep the breaker open for ever.
    """
    return opened_at if state == CLOSED else now


def breaker_hears(  # noqa: PLR0917  # plain numbers by position: a compiler for the simulator wants no keywords
    state: int, failures: int, opened_at: float, now: float, succeeded: bool, trip: int
) -> tuple[int, int, float]:
    """State, failures in a row and start of the cool-down after one outcome; it opens at `trip` failures."""
    if succeeded:
        return CLOSED, 0, opened_at
    failures = failures + 1
    if state == CLOSED and failures >= trip:
        return OPEN, failures, now
    return state, failures, opened_at


def cache_state(now: float, made_at: float, soft_s: float, hard_s: float) -> int:
    """Whether an answer made at `made_at` (-inf: there is none) is YOUNG, STALE or GONE."""
    if now <= made_at + soft_s:
        return YOUNG
    if now <= made_at + hard_s:
        return STALE
    return GONE


def fallback(cached: int, has_default: bool, prefers_default: bool) -> int:
    """What answers in place of a fresh value: CACHED, DEFAULT or, with an empty ladder, FAILED."""
    if cached != GONE and not (prefers_default and has_default):
        return CACHED
    return DEFAULT if has_default else FAILED


def is_poison(deliveries: int, most: int) -> bool:
    """Whether work has been handed out so often without an end that it is set aside."""
    return deliveries > most


def restart_at(now: float, failures: int, base_s: float, cap_s: float) -> float:
    """When something that ended is started again, after `failures` ends in a row (0: at once)."""
    if failures <= 0:
        return now
    return now + min(cap_s, base_s * 2.0 ** min(failures - 1, 60))


def checkpoint_interval(cost_s: float, mtbf_s: float) -> float:
    """From one checkpoint to the next, so that saving and repeated work together cost least.

    To first order sqrt(2 cost mtbf), and never below the cost itself: work comes between two saves.
    Sources: Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974;
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
    """
    return max(cost_s, sqrt(2.0 * cost_s * mtbf_s))
