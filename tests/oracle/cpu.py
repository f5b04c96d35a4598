"""Lets an unmodified megatron-core run on a CPU over gloo, by redirecting a few CUDA calls from outside.

`install()` must run before megatron is imported, `after_import()` once it is.
Seen working with megatron-core 0.16.1.
"""

import contextlib
import os
import warnings

import torch
from torch.overrides import TorchFunctionMode

_SEED_AND_OFFSET_BYTES = 16  # the size of a CUDA generator's state


class _Stream(contextlib.nullcontext):
    """A stream or an event: everything it is asked to wait for is already done."""

    def __init__(self, *_args, **_kwargs):
        super().__init__()

    def _done(self, *_args):
        return self

    wait_stream = wait_event = wait = record = record_event = synchronize = _done


class _Generator:
    """Stands for the CUDA generator: Megatron only stores its state and gives it back."""

    state = torch.zeros(_SEED_AND_OFFSET_BYTES, dtype=torch.uint8)

    @classmethod
    def get(cls, *_args, **_kwargs):
        return cls.state.clone()

    @classmethod
    def set(cls, new_state, *_args, **_kwargs):
        cls.state = new_state.clone()

    @classmethod
    def seed(cls, seed):
        seed_bytes = int(seed).to_bytes(8, "little") + bytes(_SEED_AND_OFFSET_BYTES - 8)
        cls.state = torch.tensor(list(seed_bytes), dtype=torch.uint8)


class _OnCpu(TorchFunctionMode):
    """Calls that ask for a CUDA device get the CPU's; optimizers compare `Tensor.type()` with names of CUDA types."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            found = found.replace("torch.", "torch.cuda.", 1)
        return found


def redirect_devices():
    """For the rest of the process."""
    _OnCpu().__enter__()


def install():
    if torch.cuda.Stream is _Stream:
        return  # in a child of `oracle.server`
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # several ranks share few cores

    def nothing():  # a new function each time: torch keeps tables by function and wants no two names for one
        return lambda *_args, **_kwargs: None

    cuda = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *_args: (9, 0)
    for name in ("set_device", "synchronize", "empty_cache", "set_stream"):
        setattr(cuda, name, nothing())
    cuda.nvtx.range_push, cuda.nvtx.range_pop = nothing(), nothing()
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = lambda *_args: _Stream()
    cuda.default_stream = lambda *_args: _Stream()
    cuda.stream = lambda _stream: _Stream()
    cuda.get_rng_state = cuda.random.get_rng_state = _Generator.get
    cuda.set_rng_state = cuda.random.set_rng_state = _Generator.set
    cuda.manual_seed = lambda seed: _Generator.seed(seed)
    cuda.manual_seed_all = lambda seed: _Generator.seed(seed)
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self

    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda group=None, async_op=False, **_kwargs: barrier(group, async_op)


def after_import():
    from megatron.core import jit
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    megatron_random._get_cuda_rng_state = _Generator.get
    megatron_random._set_cuda_rng_state = _Generator.set
    moe_utils.te_general_gemm = None  # needs TransformerEngine; the plain path is taken instead
    jit.disable_jit_fuser()
