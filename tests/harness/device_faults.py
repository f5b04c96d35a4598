"""Devices with faults, for negative controls: what does not wait must be found, on the simulation and on a GPU.

`with_fault(device_class, fault)` gives a class of the same device, and `applied(fault)` is a context in which it has it.
"""

import contextlib
from unittest import mock

from converters.io import device as device_module

__all__ = ["FAULTS", "applied", "with_fault"]

FAULTS = ("slot", "home", "event")
"""A slot is used again without waiting for it; lanes do not wait for what the home stream has yet to do to the same memory;
an event has always come."""


def _early(lane, slot):
    """In place of `_StagedLane._retire`."""
    done, slot.done = slot.done, None
    if done is not None:
        done()


def with_fault(device, fault):
    """The class of a device that has a fault."""

    class Unordered(device):
        def submit(self, stream, work, event, after=()):
            super().submit(stream, work, event)

    class Hasty(device):
        def event(self):
            event = super().event()
            event.synchronize, event.query = (lambda: None), (lambda: True)
            return event

    return {"home": Unordered, "event": Hasty}.get(fault, device)


def applied(fault):
    """What is patched for a fault."""
    if fault != "slot":
        return contextlib.nullcontext()
    return mock.patch.object(device_module._StagedLane, "_retire", _early)
