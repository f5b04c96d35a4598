"""A GPU made of this machine's memory, as late and as unforgiving as CUDA allows a real one to be.

Nothing that a stream is given is done before somebody waits for an event behind it, the home stream included: what reads
a result too early, writes to a pinned buffer too early, or uses what another stream is still to write, has wrong bytes.
Memory was another's, who is still to write 0xA5 to it on the home stream. With `cost` there is a clock: every piece of work
takes so long on its stream, the host's time is `now`, and waiting moves it on; so what overlaps can be told without seconds.
"""

import threading
from collections import deque

import torch

from converters.io.device import Staged
from converters.io.memory import free_memory

__all__ = ["Simulated"]


class Simulated(Staged):
    """See `converters.io.platforms.Cuda`. Memory is on the CPU, and that is what tensors say.

    Attributes:
        log: What was done, in order: "copy" for each piece of work of a lane, and what a test adds.
        now: The host's time.
    """

    name = "simulated:0"

    def __init__(self, serial="simulated", cost=0.0):
        self.log, self.now, self.cost = [], 0.0, cost
        self._serial, self._lock = serial, threading.RLock()
        self._home = Stream(self)

    def enter(self):
        pass

    def pinned(self, nbytes):
        return torch.full((self.buffer(nbytes),), 0xA5, dtype=torch.uint8)[:nbytes]

    def empty(self, dtype, shape):
        made = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        if made.numel():  # whoever had this memory before may not be done with it
            self.do(lambda: made.reshape(-1).view(torch.uint8).fill_(0xA5))
        return made

    def stream(self):
        return Stream(self)

    def event(self):
        return Event()

    def do(self, work):
        with self._lock:
            self._home.items.append((work, self.now, 0.0))

    def mark(self):
        with self._lock:
            return self._home.record(Event())

    def submit(self, stream, work, event, after=()):
        with self._lock:
            stream.items.extend(after)
            stream.items.append((work, self.now, self.cost))
            stream.record(event)

    def wait(self):
        self._home.synchronize()

    def room(self):
        return free_memory()

    def serial(self):
        return self._serial


class Stream:
    def __init__(self, platform):
        self.platform, self.items, self.time = platform, deque(), 0.0

    def record(self, event):
        event.stream, event.come = self, False
        self.items.append(event)
        return event

    def reach(self, event):
        """Does what comes before an event; what other streams are to do first, they do first."""
        with self.platform._lock:
            while self.items and not (event and event.come):
                item = self.items.popleft()
                if isinstance(item, Event) and item.stream is self:
                    item.come, item.time = True, self.time
                elif isinstance(item, Event):
                    item.stream.reach(item)
                    self.time = max(self.time, item.time)
                else:
                    work, issued, cost = item
                    self.time = max(self.time, issued) + cost
                    if cost:
                        self.platform.log.append(("copy", self.time))
                    work()

    def synchronize(self):
        self.reach(None)
        self.platform.now = max(self.platform.now, self.time)


class Event:
    """Nothing, until it is recorded; then a point in a stream. `query` does not have it come: it is as late as it can."""

    stream, come, time = None, True, 0.0

    def query(self):
        return self.come

    def synchronize(self):
        if self.stream is not None:
            self.stream.reach(self)
            platform = self.stream.platform
            platform.now = max(platform.now, self.time)
