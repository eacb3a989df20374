"""The step clock of a GPU up to the GPU's edge: events stand for hardware that takes its own time."""

from twinhull.profile.clock import Part, StepClock
from twinhull.profile.device import BEHIND, DeviceClock, clock_of


class Gpu:
    """Passes one event after another, `took_ms` after the one before, when it is told to work."""

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []
        self.made = 0
        self.at_ms = 0.0

    def event(self) -> "Recorded":
        self.made += 1
        return Recorded(self)

    def work(self, *took_ms: float) -> None:
        for event, one_ms in zip(self.recorded[: len(took_ms)], took_ms, strict=True):
            self.at_ms += one_ms
            event.passed_ms = self.at_ms
        del self.recorded[: len(took_ms)]


class Recorded:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.passed_ms: float | None = None

    def record(self) -> None:
        self.passed_ms = None
        if self in self._gpu.recorded:
            self._gpu.recorded.remove(self)
        self._gpu.recorded.append(self)

    def query(self) -> bool:
        return self.passed_ms is not None

    def elapsed_time(self, end_event: "Recorded") -> float:
        assert self.passed_ms is not None, "not ready: CUDA would raise"
        assert end_event.passed_ms is not None, "not ready: CUDA would raise"
        return end_event.passed_ms - self.passed_ms


def step(clock: DeviceClock) -> None:
    clock.mark(Part.DATA)
    clock.mark(Part.COPY)
    clock.own()
    clock.own()
    clock.computed()
    clock.mark(Part.OPTIMIZER)
    clock.stop()


PASSED_MS = (1.0, 2.0, 30.0, 5.0, 4.0, 1.0)  # of a step's events


def test_the_parts_are_those_of_the_gpu():
    gpu = Gpu()
    clock = DeviceClock(gpu.event)
    gpu.work(10.0)
    step(clock)
    gpu.work(*PASSED_MS)
    step(clock)
    last = clock.times.last
    assert [round(seconds, 6) for seconds in last] == [0.001, 0.002, 0.03, 0.005, 0.004, 0.0, 0.001]


def test_a_step_that_the_gpu_has_not_done_is_read_later():
    gpu = Gpu()
    clock = DeviceClock(gpu.event)
    gpu.work(0.0)
    step(clock)
    step(clock)
    assert clock.times.totals().steps == 0
    gpu.work(*PASSED_MS, *PASSED_MS)
    step(clock)
    assert clock.times.totals().steps == 2


def test_a_host_far_ahead_gives_up_the_oldest_step_and_waits_for_nothing():
    gpu = Gpu()
    clock = DeviceClock(gpu.event)
    gpu.work(0.0)
    for _ in range(BEHIND + 3):
        step(clock)
    assert clock.given_up == 3
    gpu.work(*[1.0] * len(gpu.recorded))
    step(clock)
    assert clock.times.totals().steps == BEHIND
    assert round(clock.times.step_s, 6) == 0.006


def test_events_are_used_again():
    gpu = Gpu()
    clock = DeviceClock(gpu.event)
    gpu.work(0.0)
    for _ in range(3):
        step(clock)
        gpu.work(*PASSED_MS)
    made = gpu.made
    for _ in range(50):
        step(clock)
        gpu.work(*PASSED_MS)
    assert gpu.made == made
    assert round(clock.times.totals().step_s, 6) == 0.043


def test_an_event_of_a_late_stream_makes_no_part_negative():
    gpu = Gpu()
    clock = DeviceClock(gpu.event)
    gpu.work(0.0)
    step(clock)
    own = gpu.recorded[2]
    gpu.work(*PASSED_MS)
    assert own.passed_ms is not None
    own.passed_ms += 7.0
    step(clock)
    assert min(clock.times.last) >= 0.0
    assert round(clock.times.step_s, 6) == 0.043


def test_the_processor_has_the_plain_clock():
    assert isinstance(clock_of("cpu"), StepClock)
