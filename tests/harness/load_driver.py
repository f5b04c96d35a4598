"""One rank of several that load: does a list of cases and writes what came of each.

    RANK=.. WORLD_SIZE=.. LOCAL_RANK=.. MASTER_ADDR=.. MASTER_PORT=.. python load_driver.py CASES.json ANSWERS-RANK.json

A case is a dictionary: `path`, `layout` and `options` of the load; `existing`: the caller has made a process group, perhaps
"bound" to a GPU; `worth`: from how many shared bytes an exchange is considered; `rates`: of reading and exchanging, in place
of measured ones; `break`: `{"rank": R, "how": H}`, H one of "raise", "exit", "refuse", "leave", "begin" (leaves before the
first tensor), "scatter", "allocate"; `staged`: through a simulated device, that is `"shared"` by the ranks or their `"own"`;
`ranks`: what differs in the case of some, by rank. An answer has `report` and `digest` of all tensors, or `error`.
"""

import dataclasses
import faulthandler
import hashlib
import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from converters import Layout, load
from converters.errors import DistckptError, RequestError
from converters.io.gather import Gatherer
from converters.loading import exchange, job_ranks
from harness.simulated import Simulated

RANK = int(os.environ["RANK"])


def digest(state):
    made = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        made.update(f"{name} {None if value is None else (tuple(value.shape), value.dtype)}".encode())
        if value is not None:
            made.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def broken(how):
    """What makes this rank fail."""
    real, calls = Gatherer.gather, iter(range(1 << 30))

    def gather(self, *arguments):
        if next(calls) == 2:
            if how == "exit":
                os._exit(7)
            raise ZeroDivisionError("the disk is on fire")
        return real(self, *arguments)

    if how == "refuse":

        def refuse(*_, **__):
            raise RequestError("this rank does not want to", hint="ask it again")

        return mock.patch("converters.loading.loader.find_device", refuse)
    if how == "scatter":  # what was exchanged goes to its tensors

        def land(*_):
            raise ZeroDivisionError("the disk is on fire")

        return mock.patch("converters.loading.moving._copy_into", land)
    if how == "allocate":  # the exchange's buffers

        def memory_for(*_, **__):
            raise RequestError("cpu is out of memory")

        return mock.patch("converters.loading.exchange.memory_for", memory_for)
    return mock.patch.object(Gatherer, "gather", gather)


def take(case):
    """The state of a case; may raise."""
    fault = case.get("break", {})
    with ExitStack() as stack:
        if fault.get("rank") == RANK and fault["how"] not in ("leave", "begin"):
            stack.enter_context(broken(fault["how"]))
        if "worth" in case:
            stack.enter_context(mock.patch.object(exchange, "_WORTH", case["worth"]))
        if "rates" in case:
            read, exchanged = case["rates"]
            stack.enter_context(mock.patch.object(exchange, "_reading_rate", return_value=(read, 0)))
            stack.enter_context(mock.patch.object(exchange.Exchange, "_gathering_rate", return_value=exchanged))
        if case.get("staged"):
            own = case["staged"] == "own"
            device = Simulated(f"gpu {RANK}" if own else "simulated")
            stack.enter_context(mock.patch("converters.loading.loader.find_device", return_value=device))
            stack.callback(device.wait)  # whoever reads a tensor comes behind what was asked of the home stream
            if own:  # what is done over NCCL, over gloo
                stack.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
                stack.enter_context(mock.patch.object(job_ranks, "_nccl", distributed_c10d.ProcessGroupGloo))
        found = load(case["path"], Layout(**case["layout"]), **case.get("options", {}))
        if not case.get("options", {}).get("stream"):
            return dict(found), found.report
        state = {}
        if fault.get("rank") == RANK and fault.get("how") == "begin":
            found.close()
            return {}, found.report
        for name, tensor in found:
            state[name] = tensor
            if fault.get("rank") == RANK and fault.get("how") == "leave" and len(state) == 3:
                found.close()
                return {}, found.report
        return state, found.report


class Splitting:
    """NCCL's communicator of a job: to split it, all ranks have to come."""

    @staticmethod
    def perform_nocolor_split(device):
        raise ZeroDivisionError("a rank that is no member waits for the others")


def main(cases, answers):
    torch.set_num_threads(1)  # also where this process was forked: the threads of the other are not here
    faulthandler.dump_traceback_later(550, exit=True)  # all threads, if somebody waits for ever
    out = []
    for case in json.loads(Path(cases).read_text()):
        case |= case.get("ranks", {}).get(str(RANK), {})
        if case.get("existing"):
            store = next(dist.rendezvous("env://"))[0]  # which forgets nothing that it has heard of an earlier group
            store = dist.PrefixStore(f"case {len(out)}", store)
            dist.init_process_group("gloo", store=store, rank=RANK, world_size=int(os.environ["WORLD_SIZE"]))
        if case.get("existing") == "bound":  # as with init_process_group("nccl", device_id=...)
            dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
            distributed_c10d._get_split_source = lambda _: Splitting
        begin = time.monotonic()
        try:
            state, report = take(case)
            answer = {"digest": digest(state), "count": len(state), "report": dataclasses.asdict(report)}
        except Exception as error:
            answer = {"error": str(error), "kind": type(error).__name__, "hint": getattr(error, "hint", None)}
            answer["ours"] = isinstance(error, DistckptError)
        answer["seconds"] = time.monotonic() - begin
        answer["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("load-")]
        answer["group"] = dist.is_initialized()
        if case.get("existing"):  # it is as good as before
            dist.group.WORLD.bound_device_id = None
            dist.barrier()
            dist.destroy_process_group()
        out.append(answer)
        Path(answers).write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
