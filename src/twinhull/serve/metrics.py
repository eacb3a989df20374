"""How is serving doing? The gateway's counts, for Prometheus when asked, for the supervisor each second."""

import time
from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from twinhull import policy
from twinhull.broker import Keys, entries
from twinhull.serve.answer import Desk
from twinhull.serve.latency import BOUNDS_S
from twinhull.serve.plane import Plane
from twinhull.serve.record import Recorder

SOURCES = ("fresh", "cached", "default", "failed")


class Queues:
    """Length of each pool's queue and age of its oldest entry, as seen at the last look."""

    def __init__(self, plane: Plane, keys: Keys, pools: tuple[str, ...]) -> None:
        self.length: dict[str, int] = dict.fromkeys(pools, 0)
        self.oldest_s: dict[str, float] = dict.fromkeys(pools, 0.0)
        self._plane = plane
        self._keys = keys

    def look(self) -> None:
        """Ask the broker, in the background."""
        for pool in self.length:
            queue = self._keys.queue(pool)
            self._plane.link.send("XLEN", queue, done=partial(self._counted, pool))
            self._plane.link.send("XRANGE", queue, "-", "+", "COUNT", 1, done=partial(self._dated, pool))

    def _counted(self, pool: str, reply: object) -> None:
        if isinstance(reply, int):
            self.length[pool] = reply

    def _dated(self, pool: str, reply: object) -> None:
        if isinstance(reply, list):
            found = entries([[pool, reply]]) if reply else []
            born_ms = int(found[0][0].partition(b"-")[0]) if found else time.time() * 1000
            self.oldest_s[pool] = max(0.0, time.time() - born_ms / 1000)


class Serving(Collector):
    """Everything that is counted, in Prometheus' terms."""

    def __init__(self, desks: dict[str, Desk], plane: Plane, recorder: Recorder, queues: Queues) -> None:
        self._desks = desks
        self._plane = plane
        self._recorder = recorder
        self._queues = queues
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """The answer to a scrape."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Every metric, now."""
        yield from self._endpoints()
        yield from self._lanes()
        yield _counter("events_appended", "events on the broker", "stream", self._recorder.appended)
        yield _counter("events_dropped", "events lost to a full memory", "stream", self._recorder.dropped)
        yield _gauge("queue_length", "entries waiting or in work", "pool", self._queues.length)
        yield _gauge("queue_oldest_seconds", "age of the oldest entry", "pool", self._queues.oldest_s)
        link = self._plane.link
        yield GaugeMetricFamily("twinhull_broker_up", "whether the broker answers", value=float(link.is_up))
        yield CounterMetricFamily("twinhull_broker_refused", "commands refused", value=link.refused)
        yield CounterMetricFamily(
            "twinhull_replies_unknown", "replies twice or far too late", value=self._plane.unknown
        )

    def models(self) -> dict[str, int]:
        """The version of each model in the last reply computed with it."""
        found: dict[str, int] = {}
        for lane in self._plane.lanes:
            if lane.stop.model is not None and lane.tally.last_version is not None:
                found[lane.stop.model] = max(found.get(lane.stop.model, 0), lane.tally.last_version)
        return found

    def sample(self) -> dict[str, float]:
        """The numbers of this moment, by full name."""
        values: dict[str, float] = {}
        for name, desk in self._desks.items():
            counts = desk.counts
            values |= {f"serve.{name}.{s}": n for s, n in zip(SOURCES, counts.by_source, strict=True)}
            values |= {f"serve.{name}.asked": counts.asked, f"serve.{name}.late": counts.late}
            if (seen := counts.latency.percentiles()) is not None:
                values |= {f"serve.{name}.p50_s": seen[0], f"serve.{name}.p99_s": seen[1]}
        batches = sum(lane.tally.batches for lane in self._plane.lanes)
        if batches:
            values["serve.batch"] = sum(lane.tally.rows for lane in self._plane.lanes) / batches
        values |= {f"serve.version.{name}": version for name, version in self.models().items()}
        values |= {f"serve.queue.{pool}": n for pool, n in self._queues.length.items()}
        values |= {f"events.{name}.appended": n for name, n in self._recorder.appended.items()}
        values |= {f"events.{name}.dropped": n for name, n in self._recorder.dropped.items()}
        for name, unread in self._recorder.unread.items():
            if unread.is_read or name not in self._desks:  # answers of an endpoint may be meant for nobody
                values[f"events.{name}.waiting"] = unread.count
                values[f"events.{name}.oldest_s"] = unread.oldest_age_s or 0.0
        return values

    def _endpoints(self) -> Iterable[Metric]:
        answers = CounterMetricFamily("twinhull_answers", "answers by source", labels=["endpoint", "source"])
        latency = HistogramMetricFamily("twinhull_answer_seconds", "time to answer", labels=["endpoint"])
        others = {
            name: CounterMetricFamily(f"twinhull_{name}", about, labels=["endpoint"])
            for name, about in (
                ("asked", "requests accepted"),
                ("late", "answers after the deadline"),
                ("late_replies", "fresh values too late to answer, kept for the cache"),
                ("shed", "requests not sent on"),
                ("errors", "rows that user code failed on"),
                ("retried", "rows sent once more"),
                ("defaults_failed", "default functions that raised or were too slow"),
            )
        }
        for name, desk in self._desks.items():
            counts = desk.counts
            for source, number in zip(SOURCES, counts.by_source, strict=True):
                answers.add_metric([name, source], number)
            for which, family in others.items():
                family.add_metric([name], getattr(counts, which))
            latency.add_metric([name], _buckets(counts.latency.buckets), counts.latency.sum_s)
        yield from (answers, latency, *others.values())

    def _lanes(self) -> Iterable[Metric]:
        labels = ["task", "lane", "outputs"]
        batches = CounterMetricFamily("twinhull_batches", "batches sent", labels=labels)
        rows = CounterMetricFamily("twinhull_batch_rows", "rows in them", labels=labels)
        timeouts = CounterMetricFamily(
            "twinhull_batch_timeouts", "batches not answered in time", labels=labels
        )
        breaker = GaugeMetricFamily("twinhull_breaker_open", "whether the breaker is open", labels=labels)
        in_flight = GaugeMetricFamily("twinhull_batches_in_flight", "batches waited for", labels=labels)
        for lane in self._plane.lanes:
            which = [lane.stop.task, lane.stop.lane, str(lane.outputs)]
            batches.add_metric(which, lane.tally.batches)
            rows.add_metric(which, lane.tally.rows)
            timeouts.add_metric(which, lane.tally.timeouts)
            breaker.add_metric(which, float(lane.breaker == policy.OPEN))
            in_flight.add_metric(which, lane.in_flight)
        yield from (batches, rows, timeouts, breaker, in_flight)
        yield _gauge("model_version", "version in the last reply", "model", self.models())


def _counter(name: str, about: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"twinhull_{name}", about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauge(name: str, about: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = GaugeMetricFamily(f"twinhull_{name}", about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    bounds = [*(repr(bound) for bound in BOUNDS_S), "+Inf"]
    return [(bound, float(sum(counts[: i + 1]))) for i, bound in enumerate(bounds)]
