"""A device whose clock only moves when something happens on it, for learning to measure: its true times are known.

It does what makes a real GPU hard to time, each trait on request: a launch returns before the work is done, the
first call of a kernel compiles, an input that was seen a moment ago is still in a cache, a run now and then takes
far too long. The same seed gives the same times. Lesson 04 measures it; so does `benchmark` of the exercise.

    device = FakeDevice(seed=0)
    kernel = device.kernel(0.002)              # a kernel that takes 2 ms
    kernel(device.fresh_input())               # launched; the device is still at work
    device.synchronize()                       # now it is done
    device.clock()                             # seconds
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

LAUNCH_S = 5e-6  # the host's share of a call
CACHED_INPUTS = 4  # inputs that a cache holds
CACHED = 0.4  # share of its time that a run takes on one of them


class FakeDevice:
    """One queue of work behind a host that feeds it.

    asynchronous  a launch returns at once; otherwise it waits until its run is done
    compile_s     seconds that the first call of each kernel takes on the host
    caching       a run on one of the last few inputs is faster
    jitter        standard deviation of a run's time, as a share of it
    outliers      share of runs that take ten times as long
    input_s       seconds of work on the device that a fresh input takes, as random numbers do on a GPU

    `launches` counts what was asked of the device so far.
    """

    def __init__(
        self,
        seed: int,
        asynchronous: bool = True,
        compile_s: float = 0.0,
        caching: bool = False,
        jitter: float = 0.01,
        outliers: float = 0.0,
        input_s: float = 0.0,
    ):
        self.asynchronous, self.compile_s, self.caching = asynchronous, compile_s, caching
        self.jitter, self.outliers, self.input_s = jitter, outliers, input_s
        self.launches = 0
        self._random = random.Random(seed)
        self._host = 0.0  # where the host's clock stands
        self._done = 0.0  # when the device will have done all that was launched
        self._cache: deque[object] = deque(maxlen=CACHED_INPUTS)

    def clock(self) -> float:
        """Seconds on the host."""
        return self._host

    def synchronize(self) -> None:
        """Let the host wait until all launched work is done."""
        self._host = max(self._host, self._done)

    def fresh_input(self) -> object:
        """An input that no run has seen. The device may still be making it, also where launches wait."""
        self._done = max(self._host, self._done) + self.input_s
        return object()

    def kernel(self, seconds: float) -> Callable[[object], None]:
        """A function that launches one run on an input; the median run on a fresh one takes `seconds`."""
        compiled = False

        def launch(input: object) -> None:
            nonlocal compiled
            self._host += LAUNCH_S + (0 if compiled else self.compile_s)
            compiled = True
            self.launches += 1
            self._done = max(self._host, self._done) + self._duration(seconds, input)
            if not self.asynchronous:
                self.synchronize()

        return launch

    def _duration(self, seconds: float, input: object) -> float:
        if self._random.random() < self.outliers:
            seconds *= 10
        seconds *= max(0.1, self._random.gauss(1, self.jitter))
        warm = self.caching and any(input is seen for seen in self._cache)
        self._cache.append(input)
        return seconds * CACHED if warm else seconds
