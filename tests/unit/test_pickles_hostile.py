"""No hostile pickle runs, changes a class, hangs, or takes much memory; and the payloads are live."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from converters.errors import DistckptError
from converters.formats.dcp.metadata import read_metadata
from converters.pickles.describe import describe
from converters.pickles.emit import dumps
from converters.pickles.machine import parse
from converters.pickles.policy import hostile as is_hostile
from converters.pickles.policy import hostile_tail
from harness import hostile_pickles as hostile

GOLDEN = Path(__file__).parents[1] / "golden" / "pickles"
_NOT_A_NAME = {
    "protocol 0", "no PROTO", "INST", "INST after PROTO", "EXT1", "EXT4", "name with a newline in it", "full-width name",
}  # fmt: skip
"""Payloads refused before a name is looked at, or for a name that is none."""


def child(action: str, folder: Path) -> dict:
    done = subprocess.run(
        [sys.executable, hostile.__file__, action, str(folder)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_payloads_are_live(tmp_path):
    """The positive control: the same bytes do run under plain pickle."""
    fired = child("live", tmp_path)
    expected = {case.name: case.fires for case in hostile.code_cases("m")}
    assert fired == expected
    assert sum(fired.values()) >= 100


def test_no_payload_runs_here(tmp_path):
    results = child("inert", tmp_path)
    assert results.pop("new modules") == []
    assert results.pop("events") == []
    assert results.pop("files") == []
    assert len(results) == len(hostile.code_cases("m")) + len(hostile.trick_cases())
    assert {kind for kind, _ in results.values()} <= {"UnsafePickle", "PickleFormatError"}


@pytest.mark.parametrize("case", hostile.code_cases("/nowhere/m"), ids=lambda case: case.name)
def test_hostile_global_is_named(case):
    with pytest.raises(DistckptError) as caught:
        parse(case.data, label="common.pt: data.pkl")
    assert caught.value.exit_code == 3
    assert caught.value.message.startswith("common.pt: data.pkl")
    if case.name == "second pickle":
        assert "follow the end" in caught.value.message
    elif case.name not in _NOT_A_NAME:
        assert "hostile global " in caught.value.message
        assert " at byte " in caught.value.message
        assert caught.value.hint


@pytest.mark.parametrize("case", hostile.trick_cases(), ids=lambda case: case.name)
def test_tricks_are_refused(case):
    with pytest.raises(DistckptError):
        parse(case.data)


def test_bombs_are_bounded(tmp_path):
    """Within 5 s of processor time and 200 MB over the size of the pickle, also to show and to write."""
    results = child("bombs", tmp_path)
    assert set(results) == {case.name for case in hostile.bomb_cases()}
    for name, outcome in results.items():
        assert outcome["status"] == 0, (name, outcome)
        assert outcome["cpu"] < 5, (name, outcome)
        assert outcome["rss"] * 1024 < 200e6 + outcome["size"], (name, outcome)
    harmless = {"deep list", "tuple graph", "list graph", "list in itself", "tuple in itself", "bytearray of 10^11",
                "many floats", "many one-character strings"}  # fmt: skip
    assert {name for name, outcome in results.items() if outcome["result"].startswith("read")} == harmless


@pytest.mark.parametrize("seed_file", ["v016_common.pkl", "v019_fullyreshardable.metadata", "v009_modelspace.metadata"])
def test_mutations_only_raise_our_errors(seed_file):
    original = (GOLDEN / seed_file).read_bytes()
    rng = random.Random(seed_file)
    accepted = refused = 0
    for _ in range(120):
        mutant = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(2, len(mutant))
            action = rng.randrange(4)
            if action == 0:
                mutant[at] = rng.randrange(256)
            elif action == 1:
                mutant[at] ^= 1 << rng.randrange(8)
            elif action == 2:
                del mutant[at : at + rng.choice([1, 2, 50])]
            else:
                other = rng.randrange(len(original))
                mutant[at:at] = original[other : other + rng.choice([1, 4, 60])]
        data = bytes(mutant)
        try:
            tree = parse(data)
            json.dumps(describe(tree))
            dumps(tree, data[1])
            accepted += 1
        except DistckptError:
            refused += 1
        if seed_file.endswith(".metadata"):
            with contextlib.suppress(DistckptError):
                read_metadata(data)
    assert accepted
    assert refused


def test_truncations():
    original = (GOLDEN / "v016_common.pkl").read_bytes()
    for size in [*range(200), *range(200, len(original), 97)]:
        with pytest.raises(DistckptError):
            parse(original[:size])


@pytest.mark.parametrize("path", [
    "torch._utils:_rebuild_tensor_v2", "torch:FloatStorage", "torch:bfloat16", "torch:Size",
    "torch.serialization:_get_layout", "torch.storage:UntypedStorage", "torch._C:Generator", "torch._C._nn:gelu",
    "torch.nn.init:normal_", "torch:device", "torch.distributed.checkpoint.metadata:Metadata",
    "torch.distributed.checkpoint.filesystem:_StorageInfo", "torch.distributed.checkpoint.planner:SavePlan",
    "torch.distributed.tensor:DTensor", "torch.distributed.tensor.placement_types:Shard",
    "torch.distributed.device_mesh:DeviceMesh", "torch._tensor:_rebuild_from_type_v2",
    "megatron.core.transformer.enums:AttnBackend", "megatron.core.enums:ModelType",
    "megatron.training.activations:squared_relu", "megatron.core.dist_checkpointing.strategies.torch:MCoreSavePlan",
    "megatron.core.optimizer:OptimizerConfig", "megatron.core.rerun_state_machine:RerunState",
    "transformer_engine.common.recipe:DelayedScaling", "nemo.collections.llm.gpt.model.llama:Llama31Config8B",
    "numpy:ndarray", "numpy:dtype", "numpy.dtypes:UInt32DType", "numpy._core.multiarray:_reconstruct",
    "numpy.core.multiarray:scalar", "collections:OrderedDict", "collections:defaultdict", "argparse:Namespace",
    "types:SimpleNamespace", "functools:partial", "pathlib:PosixPath", "signal:Signals", "signal:SIGTERM",
    "_codecs:encode", "_io:BytesIO", "io:BytesIO", "copy_reg:_reconstructor", "__builtin__:set",
    "builtins:ValueError", "datetime:timedelta", "enum:IntEnum", "re:_compile", "uuid:UUID", "random:Random",
    "decimal:Decimal", "__main__:MyConfig", "__main__:_Private", "omegaconf.dictconfig:DictConfig",
    "lightning.pytorch.utilities.parsing:AttributeDict", "vescale.checkpoint.planner.vescale.vescale_planner:Plan",
    "user.code:Outer.Inner", "logging:getLogger",
])  # fmt: skip
def test_names_of_real_checkpoints_are_passive(path):
    module, name = path.split(":")
    assert not is_hostile(module, name)


@pytest.mark.parametrize("path", [
    "os:system", "os.path:exists", "posix:system", "nt:system", "sys:exit", "subprocess:Popen", "builtins:getattr",
    "builtins:__import__", "__builtin__:eval", "__builtin__:apply", "builtins:open", "builtins:vars",
    "builtins:dict.fromkeys", "importlib:import_module", "importlib.util:find_spec", "pkgutil:resolve_name",
    "runpy:run_path", "operator:itemgetter", "ctypes:CDLL", "socket:socket", "shutil:rmtree", "torch.hub:load",
    "torch.jit:load", "torch.jit._script:script", "torch.storage:_load_from_bytes", "torch:load",
    "torch.serialization:load", "pickle:loads", "marshal:loads", "types:FunctionType", "types:CodeType",
    "types:MethodType", "code:interact", "pdb:run", "timeit:timeit", "cProfile:run",
    "asyncio.subprocess:create_subprocess_exec", "multiprocessing:Process", "multiprocessing.util:spawnv_passfds",
    "commands:getoutput", "six.moves.builtins:eval", "numpy.f2py.crackfortran:getlincoef",
    "torch.multiprocessing:spawn", "torch.fx.graph_module:reduce_graph_module",
    "torch._inductor.codecache:compile_file", "joblib:load", "dill:loads", "cloudpickle.cloudpickle:_make_function",
    "transformers:AutoModel.from_pretrained", "a.b:C.__init__.__globals__", "yaml:unsafe_load", "pandas:read_pickle",
    "signal:raise_signal", "functools:reduce", "io:open", "io:FileIO", "argparse:FileType",
    "uuid:_get_command_stdout", "typing:sys.modules", "mypkg:os.system", "mypkg.subprocess:run",
])  # fmt: skip
def test_hostile_names(path):
    module, name = path.split(":")
    assert is_hostile(module, name)


def test_hostile_names_in_skipped_plans_are_found():
    data = (GOLDEN / "v019_fullyreshardable.metadata").read_bytes()
    start = data.index(b"all_local_plans")
    assert hostile_tail(data, start) is None
    evil = data[:-3] + b"\x8c\x01x\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R" + data[-3:]
    with pytest.raises(DistckptError, match="hostile global"):
        read_metadata(evil)
