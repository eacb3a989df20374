"""What a `System` holds: pools, components, links, endpoints and a budget, for any architecture.

`None` means not known; known to be absent has its own value: `0`, `false`, `[]`, `never`, `unlimited`.
Quantities are text in files (`200 ms`) and SI floats here. All classes are frozen and refuse unknown fields.
In Python a system is built with the same texts: `System(name="shop", pools={"web": {"nodes": 4}})`.
"""

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from twinhull.system.fields import (
    Batch,
    Bytes,
    Entry,
    Flow,
    Gpus,
    Interval,
    Network,
    Number,
    Path,
    Pause,
    Positive,
    Range,
    Rate,
    Retries,
    Seconds,
    Share,
    Span,
    Time,
    Usd,
    Whole,
    Word,
    Words,
)

ProcessKind = Literal["client", "gateway", "service", "worker", "scheduler", "monitor", "external"]
StateKind = Literal["broker", "queue", "cache", "store", "registry"]
LinkKind = Literal["call", "publish", "consume", "read", "write", "collective", "reply", "control"]
Engine = Literal["single", "ddp", "fsdp", "hsdp", "zero-1", "zero-2", "zero-3"]
Lane = Literal["event", "job"]


class Part(BaseModel):
    """What every thing in a system is: frozen, with known fields only."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)


def _short_for(field: str, value: object) -> object:
    """`checkpoint: 10 min` stands for `checkpoint: {every: 10 min}`."""
    return value if isinstance(value, (dict, Part)) else {field: value}


class Pool(Part):
    """Where work runs. `cpus`, `gpus`, `network` and `price` are those of one node."""

    nodes: Range | None = Field(
        None, description="how many nodes; a range is what may be bought or scaled to"
    )
    cpus: Whole | None = Field(None, description="CPU cores of one node")
    gpus: Gpus | None = Field(None, description="GPUs of one node")
    network: Network | None = Field(None, description="all network ports of one node")
    zone: Word | None = Field(None, description="the provider's zone")
    provider: Word | None = Field(None, description="who rents it out; with the device it finds the price")
    market: Literal["on-demand", "spot", "reserved"] | None = Field(None, description="how it is rented")
    price: Usd | None = Field(None, description="of one node")
    start_time: Seconds | None = Field(None, description="until a new node is there")
    mtbf: Interval | None = Field(None, description="time between failures of one node, on average")


class Component(Part):
    """What runs or keeps state."""

    host: Word | None = Field(None, description="the component whose process holds this one")
    pool: Word | None = Field(None, description="the pool it runs in")
    replicas: Range | None = Field(None, description="how many of it run at the same time")
    software: Word | None = Field(None, description="what it is: redis, celery, s3")
    restarts: Number | None = Field(None, description="how often it is started again after a crash")


class Process(Component):
    """A process that answers, works off a queue, or watches."""

    kind: ProcessKind
    gpus: Gpus | None = Field(None, description="the GPUs that one replica holds")
    concurrency: Positive | None = Field(None, description="calls that one replica works on at a time")
    prefetch: Whole | None = Field(None, description="calls that one replica takes ahead of its work")


class Task(Component):
    """A function of yours that answers calls."""

    kind: Literal["task"]
    gpus: Gpus | None = Field(None, description="the GPUs that one call uses")
    run: Entry | None = Field(None, description="the function, as module:function")
    service_time: Time | None = Field(None, description="how long one call takes")
    batch: Batch | None = Field(
        None, description="how many calls are answered together, and the longest wait for it"
    )
    model: Word | None = Field(None, description="the training workload whose newest version it is given")
    time_limit: Interval | None = Field(None, description="a call that takes longer is stopped")
    every: Interval | None = Field(None, description="how often it runs without being asked")
    retries: Retries | None = Field(None, description="how often a failed call is tried again")
    expires: Interval | None = Field(None, description="a call that has waited longer is dropped")
    ack: Literal["early", "late"] | None = Field(
        None, description="taken off the queue before or after the work"
    )
    redelivered: StrictBool | None = Field(
        None, description="whether a call survives the death of its worker"
    )
    idempotent: StrictBool | None = Field(None, description="whether running it twice does no harm")
    lane: Lane | None = Field(None, description="event: answers in milliseconds; job: long or retried work")


class Shape(Part):
    """The size of a model; a transformer has all of them."""

    params: Number | None = Field(None, description="weights of the model")
    layers: Positive | None = None
    hidden: Positive | None = None
    sequence: Positive | None = None
    vocabulary: Positive | None = None


class Parallel(Part):
    """How a model is spread over ranks."""

    engine: Engine | None = Field(None, description="left out: Twinhull chooses")
    shard: Positive | None = Field(
        None, description="hsdp: ranks that share one copy of the model; left out: those of one node"
    )
    offload: StrictBool | None = Field(None, description="whether optimizer and weights live in CPU memory")


class Checkpoint(Part):
    """When and where training state is saved."""

    every: Pause | None = Field(
        None, description="in time or in steps, never, or auto: from what saving costs and the pool's mtbf"
    )
    to: Word | None = Field(None, description="the store that keeps them")
    keep: Positive | None = Field(None, description="how many are kept")
    atomic: StrictBool | None = Field(None, description="whole or absent, never half written")
    asynchronous: StrictBool | None = Field(
        None, alias="async", description="whether training goes on while it is written"
    )

    _short = model_validator(mode="before")(lambda value: _short_for("every", value))


class Launch(Part):
    """How the processes of a training job are started."""

    processes: Positive | None = Field(None, description="ranks on one node")


class Train(Component):
    """A training job of yours."""

    kind: Literal["train"]
    gpus: Gpus | None = Field(None, description="the GPUs that one replica holds")
    run: Entry | None = Field(None, description="the function, as module:function")
    command: Word | None = Field(None, description="a script of your own instead, as typed in a shell")
    publish: Word | None = Field(None, description="the directory in which the command leaves its model")
    every: Interval | None = Field(None, description="how often it runs; left out: once")
    length: Span | None = Field(None, description="of one run, in time or in steps")
    elastic: Range | None = Field(None, description="node counts it may go on with")
    micro_batch: Positive | None = Field(None, description="the most samples that a rank takes at a time")
    precision: Literal["fp32", "bf16"] | None = Field(None, description="of computation; weights stay fp32")
    recompute: StrictBool | None = Field(
        None, description="whether activations are computed again instead of kept"
    )
    nan: Literal["stop", "ignore"] | None = Field(None, description="what a loss that is no number does")
    shape: Shape | None = None
    parallel: Parallel | None = None
    checkpoint: Checkpoint | None = Field(None, description="10 min, or {every, to, keep, ...}")
    launch: Launch | None = None
    gang: StrictBool | None = Field(None, description="whether it starts only when all its nodes are there")
    hang_timeout: Interval | None = Field(None, description="a step without progress for so long is a crash")
    requeue: StrictBool | None = Field(None, description="whether it is started again after a preemption")
    walltime: Interval | None = Field(None, description="the scheduler ends it after so long")
    warning: Interval | None = Field(
        None, description="from the notice of a preemption to the end of the node"
    )
    notice: Entry | None = Field(
        None, description="your function that says whether this node is about to be taken"
    )


class State(Component):
    """What keeps something: messages, answers, files, models."""

    kind: StateKind
    url: Word | None = Field(None, description="where it is; Twinhull then starts none of its own")
    lost_with: Literal["process", "container", "node", "zone", "nothing"] | None = Field(
        None, description="the smallest loss that takes what it holds along"
    )
    syncs: Seconds | None = Field(None, description="how often memory reaches disk")
    size: Bytes | None = Field(None, description="how much it holds at most")
    bandwidth: Flow | None = None
    keep: Positive | None = Field(None, description="how many versions are kept")
    bound: Number | None = Field(None, description="how many entries a queue holds at most")
    order: Literal["fifo", "lifo", "priority"] | None = None
    deliveries: Number | None = Field(
        None, description="how often an entry is handed out before it is set aside"
    )
    dead_letter: StrictBool | None = Field(None, description="whether entries set aside are kept")
    ttl: Seconds | None = Field(None, description="how long a cached answer is good")
    hit_rate: Share | None = Field(None, description="the share of requests it answers")
    coalesces: StrictBool | None = Field(None, description="whether equal requests at a time become one call")


AnyComponent = Annotated[Process | Task | Train | State, Field(discriminator="kind")]


class Link(Part):
    """Who acts (`from`) on whom (`to`), and how."""

    source: Word = Field(alias="from", description="the component or pool that acts")
    target: Word = Field(alias="to", description="the component or pool that it acts on")
    kind: LinkKind | None = None
    task: Word | None = Field(None, description="the task that is asked for")
    when: Literal["each", "start", "late"] | None = Field(
        None, description="at each request, at the start only, or only when the fresh answer is late"
    )
    wait: Literal["none", "await", "slot", "loop"] | None = Field(
        None, description="what the caller holds meanwhile"
    )
    timeout: Interval | None = None
    retries: Retries | None = None
    expires: Interval | None = Field(None, description="what has waited longer is dropped")
    payload: Bytes | None = None
    overwrites: StrictBool | None = Field(None, description="whether a write replaces what was there")


class Endpoint(Part):
    """What is promised to whom."""

    client: Word | None = Field(None, description="the component that asks")
    path: Path | None = Field(None, description="tasks in their order; an inner list runs at the same time")
    rate: Rate | None = Field(None, description="requests, usually")
    peak: Rate | None = Field(None, description="requests, at most")
    deadline: Interval | None = Field(None, description="every request is answered within it")
    objective: Share | None = Field(None, description="the share of requests answered within it")
    fallback: Words | None = Field(
        None, description="what answers instead, in this order: cache, a function or a component; [] is none"
    )


class Budget(Part):
    """Money over time, and which parts of the bill it covers."""

    money: Usd | None = None
    covers: tuple[Literal["gpu", "cpu", "storage", "network", "orchestration", "idle"], ...] | None = None

    _short = model_validator(mode="before")(lambda value: _short_for("money", value))


class System(Part):
    """One architecture, whoever described it."""

    name: Word
    pools: dict[str, Pool] = Field(default_factory=dict)
    components: dict[str, AnyComponent] = Field(default_factory=dict)
    links: tuple[Link, ...] = ()
    endpoints: dict[str, Endpoint] = Field(default_factory=dict)
    budget: Budget | None = None


CLASS_BY_KIND: dict[str, type[Process | Task | Train | State]] = {
    "task": Task,
    "train": Train,
    **dict.fromkeys(get_args(ProcessKind), Process),
    **dict.fromkeys(get_args(StateKind), State),
}
