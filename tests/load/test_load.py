"""`load`: every golden checkpoint at several layouts, compared with the truth; bytes, checksums, streams, refusals."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from safetensors.torch import load_file

import converters
from converters import Layout, iter_tensors, load, load_common, load_metadata, load_plain_tensors
from converters.errors import DistckptError, FormatError, IntegrityError, Interrupted, RequestError
from converters.events import Moved, PlanReady, StopFlag
from converters.formats import open_checkpoint
from converters.io import device as device_module
from converters.io.cast import apply, choose_device
from converters.io.device import Device
from converters.io.gather import Gatherer
from converters.io.memory import free_memory, memory_errors
from converters.io.platforms import Cuda, find_device, gpu_of, serial_of
from converters.loading.rank_plan import plan_load
from converters.megatron.rank_state_dict import LocalModel
from converters.planning.plan import Op
from harness import hf_reference
from harness.checkpoints import GOLDENS, REPOSITORY, SCALE, copy_golden, flip, golden, payloads, truth, write_llama
from harness.device_faults import FAULTS, applied, with_fault
from harness.legacy_cases import LEGACY
from harness.on_disk import read, write
from harness.processes import wait_until
from harness.simulated import Simulated
from harness.support import GOLDEN

torch = pytest.importorskip("torch")
WHO = [(Layout(), 0), *((Layout(tp=2, pp=2), rank) for rank in range(4)), (Layout(tp=4), 3)]


def path_of(name):
    return GOLDEN / name if name in LEGACY else golden(name)


def config_of(name):
    return (LEGACY.get(name) or GOLDENS[name])[0]


def bits(tensor):
    """The elements of a torch tensor as unsigned integers of their size."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    found = tensor.contiguous().reshape(-1).view(kind).numpy().reshape(tuple(tensor.shape))
    return found.view(f"u{tensor.element_size()}")


def expected_of(path, layout, rank, whole, kind=None):
    """What a rank has by chunk and name, cut from whole tensors with plain numpy; rows that are not known are 0."""
    out = []
    for held in LocalModel.of(open_checkpoint(path).catalog, layout).rank(rank):
        chunk = {}
        for tensor in held:
            full = {name: whole(name) for name in tensor.sources}
            if any(value is None for value in full.values()) or (kind and not tensor.trained):
                continue
            array = np.zeros(tensor.matrix, f"u{tensor.dtype.itemsize if kind is None else kind}")
            for copy in tensor.copies:
                value = full[copy.source]
                rows = max((c.source_box.stop[0] for c in tensor.copies if c.source == copy.source), default=0)
                if value.ndim and rows > len(value):  # the truth lacks the rows of the padded vocabulary
                    value = np.concatenate([value, np.zeros((rows - len(value), *value.shape[1:]), value.dtype)])
                part = value[copy.source_box.slices]
                array[copy.target_box.slices] = part.T if copy.op is Op.TRANSPOSE else part
            chunk[tensor.name] = array.reshape(tensor.shape)
        out.append(chunk)
    return out


def same(found, want, vocabulary):
    """Equality, but for rows beyond the true vocabulary, which the truth does not know."""
    assert found.shape == want.shape
    if vocabulary is not None:
        found, want = found[: max(0, vocabulary)], want[: max(0, vocabulary)]
    return np.array_equal(found, want)


def true_rows(name, layout, rank, state, config):
    """How many rows of a rank's part of the embedding the truth knows."""
    if not name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return None
    known = 250 if config == "llama4" else 120
    return known - layout.coordinates(rank).tp * state[name].shape[0]


@pytest.mark.parametrize("name", [*GOLDENS, *LEGACY])
def test_every_rank_has_the_truth(name):
    known, config = truth(config_of(name)), config_of(name)
    whole = lambda source: next((known[k] for k in (f"model/{source}", f"buffer/{source}") if k in known), None)  # noqa: E731
    for layout, rank in WHO:
        state = load(path_of(name), layout, rank)
        (want,) = expected_of(path_of(name), layout, rank, whole)
        tensors = [key for key in state if not key.endswith("_extra_state")]
        assert list(want) == tensors
        for key in tensors:
            assert same(bits(state[key]), want[key], true_rows(key, layout, rank, state, config)), key
        assert state.report.bytes_read == state.report.bytes_needed


OPTIMIZERS = [
    "llama_adam_tp2pp2",
    "llama_dpreshardable_tp2pp2dp2",
    "llama_dpzero_tp2pp2dp2",
    "v009_llama_modelspace_tp2pp2dp2",
    "v019_llama_fullyreshardable_tp2dp2",
    "mixtral_dpreshardable_ep2pp2",
    "legacy_llama_distopt_tp2pp2dp2",
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_master_weights_and_moments(name):
    known, config, layout = truth(config_of(name)), config_of(name), Layout(tp=2, pp=2)
    for rank in (0, 3):
        state = load(path_of(name), layout, rank, optimizer=True)
        for kind, spelt in (("master", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            (want,) = expected_of(
                path_of(name), layout, rank, lambda source, kind=kind: known.get(f"{kind}/{source}"), 4
            )
            assert set(state.optimizer()) == set(want)
            for key, array in want.items():
                found = state.optimizer()[key][spelt]
                assert found.dtype == torch.float32
                assert same(bits(found), array, true_rows(key, layout, rank, state, config)), (kind, key)
        assert not any(key.startswith("optimizer.") for key in state.chunk())


def test_state_of_another_parameter_is_refused(tmp_path, monkeypatch):
    """Flat buckets store no names: a sample of the masters tells whose state is whose, then all of them are compared."""
    folder = copy_golden("llama_dpreshardable_tp2pp2dp2", tmp_path / "ckpt")
    path, offset, size = next(p[1:] for p in payloads(folder) if p[0].endswith("layers.1.mlp.linear_fc2.weight"))
    flip(path, offset + size - 1)
    monkeypatch.setattr("converters.io.sources.Sources.check", lambda *_: None)  # the checksum would notice, too
    monkeypatch.setattr(
        "converters.optimizer.state.mismatches", lambda *_: []
    )  # so does the sample, in a tensor this small
    assert load(golden("llama_dpreshardable_tp2pp2dp2"), Layout(), 0, optimizer=True)
    for stream in (False, True):
        with pytest.raises(IntegrityError, match="do not round to the weights") as caught:
            dict(load(folder, Layout(), 0, optimizer=True, stream=stream))
        assert caught.value.tensor == "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    "name",
    [
        "llama_adam_tp2pp2",
        "llama_fullyreshardable_tp2pp2dp2",
        "v014_llama_modelspace_tp2pp2dp2",
        "legacy_llama_adam_tp2pp2",
        "muon16_tp2dp2",
    ],
)
def test_masters_are_proved_whoever_reads_them(name, tmp_path):
    """The last element of one master is another parameter's, its checksum right: no sample of the first would show it."""
    folder = shutil.copytree(path_of(name), tmp_path / "ckpt", copy_function=shutil.copyfile)
    spelt = "optimizer.state.param", "optimizer.state.fp32_param", "optimizer.state.master_param"
    tensors = open_checkpoint(folder).catalog.tensors
    stored = next(n for n in tensors if n.startswith(spelt) and n.endswith("1.mlp.linear_fc2.weight"))
    assert tensors[stored].dtype.name == "float32"
    values = read(folder, stored)
    values.reshape(-1)[-1] = values.reshape(-1)[0]
    assert len(set(values.reshape(-1)[[0, -2]].tolist())) == 2
    parameter = re.sub(r"optimizer\.state\.\w+?\.", "", stored)
    canonical, last = f"optimizer.state.param.{parameter}", [n - 1 for n in values.shape]

    def sliced(path, rows):
        with converters.open(path) as checkpoint:
            return checkpoint.get_slice(canonical)[rows]

    readers = {
        "load": lambda path: load(path, Layout(), 0, optimizer=True),
        "stream": lambda path: dict(load(path, Layout(), 0, optimizer=True, stream=True)),
        "a rank": lambda path: load(path, Layout(tp=2), 1, optimizer=True),
        "iter_tensors": lambda path: dict(iter_tensors(path, canonical, optimizer=True)),
        "open": lambda path: sliced(path, slice(None)),
        "slice": lambda path: sliced(path, slice(-1, None)),
    }
    for reader in readers.values():
        assert len(reader(folder))
    write(folder, stored, values)
    assert len(sliced(folder, slice(0, 1)))
    for reader in readers.values():
        with pytest.raises(IntegrityError, match="do not round to the weights") as caught:
            reader(folder)
        assert caught.value.tensor == parameter
        assert f"first at {last}: the master weight is " in caught.value.details[0]


@pytest.mark.parametrize(
    "name",
    [
        "llama_adam_tp2pp2",
        "mixtral_adam_ep2tp2",
        "gpt_adam_tp2pp2",
        "deepseek_v3_weights_pp2ep2",
        "legacy_gpt_adam_tp2pp2",
    ],
)
def test_names_of_transformers(name):
    config, family = config_of(name), (LEGACY.get(name) or GOLDENS[name])[1]
    want = hf_reference.expected(config, family, truth(config))
    state = load(path_of(name), Layout(), 0, names="hf")
    assert set(state) == set(want)
    for key, array in want.items():
        assert np.array_equal(bits(state[key]), array), key


def test_models_under_other_names():
    """FSDP2's folders keep the names of transformers, others those of anybody."""
    hugging, own = GOLDEN / "fsdp2_llama_dp2", GOLDEN / "dcp_plain"
    known = load_file(GOLDEN / "truth" / "fsdp2_llama_dp2.safetensors")
    state = load(hugging, Layout(), 0, names="hf")
    assert len(state) == 21
    for name, value in state.items():
        assert torch.equal(bytes_of(value), bytes_of(known[next(k for k in known if k.endswith(name))])), name
    assert load(hugging, Layout(), 0, names="hf", dtype="fp32")["lm_head.weight"].dtype == torch.float32
    for path, hint in ((hugging, "names='hf'"), (own, "load_plain_tensors")):
        with pytest.raises(RequestError, match="not Megatron's") as caught:
            load(path, Layout(), 0)
        assert hint in caught.value.hint
    assert len(load_plain_tensors(own)) == 21


@pytest.mark.parametrize("name", ["mixtral_adam_ep2tp2"])
def test_transformers_takes_it(name):
    import transformers

    from converters.megatron.model_args import ModelArgs
    from converters.models import infer
    from converters.models.export import map_to_hf

    catalog = open_checkpoint(golden(name)).catalog
    args = ModelArgs.from_catalog(catalog)
    config = map_to_hf(catalog, args, infer(args, catalog)).config
    kind = getattr(transformers, config["architectures"][0])
    _, info = kind.from_pretrained(
        None,
        config=transformers.AutoConfig.for_model(**config),
        state_dict=load(golden(name), Layout(), 0, names="hf"),
        output_loading_info=True,
    )
    assert not any(info.values())


# ---------------------------------------------------------------------- a device behind a stream


@pytest.fixture
def simulated(monkeypatch):
    """`load` goes through pinned tiles and a stream of a simulated device, which copies as late as it can."""
    device = Simulated()
    patch_device(monkeypatch, device)
    return device


def patch_device(monkeypatch, device):
    """The GPU that a load finds."""
    for module in ("loader", "state"):
        monkeypatch.setattr(
            f"converters.loading.{module}.find_device", lambda name, local=0: device if "cuda" in name else Device()
        )


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def load_on(request):
    """Loads as `load`, onto a device; what it gives is on the host."""
    device = request.getfixturevalue("simulated") if request.param == "simulated" else None

    def taken(*args, **options):
        state = dict(load(*args, device="cuda:0", **options))
        if device:
            device.wait()  # what reads a tensor on a GPU comes behind all that was asked of the home stream
        else:
            assert all(v is None or v.is_cuda for v in state.values())
        return {name: v if v is None else v.cpu() for name, v in state.items()}

    return taken


def equal(have, want):
    assert set(have) == set(want)
    return all(v is None or torch.equal(bytes_of(v), bytes_of(want[k])) for k, v in have.items())


@pytest.mark.parametrize("name", ["llama_adam_tp2pp2", "v009_zarr_llama_adam_tp2pp2", "mixtral_adam_ep2tp2"])
def test_a_device_gets_the_same_bits(name, load_on):
    cases = [{}, {"dtype": "fp32"}, {"stream": True, "max_memory": 4 << 20}]
    for layout, options in itertools.product((Layout(), Layout(tp=4)), cases):
        want = load(golden(name), layout, layout.world_size - 1, dtype=options.get("dtype"))
        assert equal(load_on(golden(name), layout, layout.world_size - 1, **options), want)


def test_a_device_gets_optimizer_state_and_zeros(load_on, tmp_path):
    source = golden("llama_dpreshardable_tp2pp2dp2")
    assert equal(load_on(source, Layout(tp=2), 1, optimizer=True), load(source, Layout(tp=2), 1, optimizer=True))
    write_llama(tmp_path / "ckpt", layers=1, hidden=256, ffn=512, vocab=500)  # the last ranks' rows are not stored
    assert equal(load_on(tmp_path / "ckpt", Layout(tp=8), 7), load(tmp_path / "ckpt", Layout(tp=8), 7))


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", ["gpt_adam_tp2pp2", "nemotron_weights_tp2", "llama_ln1p_weights_tp2pp2"])
def test_a_device_casts_transposes_and_shifts(name, load_on):
    for dtype in (None, "fp32", "fp16"):
        want = load(golden(name), Layout(), 0, names="hf", dtype=dtype)
        assert equal(load_on(golden(name), Layout(), 0, names="hf", dtype=dtype), want)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_wait_is_found_by_the_simulation(fault, monkeypatch, tmp_path):
    """The negative controls of the tests above."""
    write_llama(tmp_path / "ckpt", layers=2, hidden=256, ffn=512, vocab=500)
    device = with_fault(Simulated, fault)()
    patch_device(monkeypatch, device)
    layout = Layout(tp=8)  # the last rank's rows of the vocabulary are filled up with zeros
    want = load(tmp_path / "ckpt", layout, 7)
    with applied(fault):
        have = load(tmp_path / "ckpt", layout, 7, device="cuda")
    device.wait()
    assert not equal(have, want)


def test_reading_and_copying_overlap(monkeypatch, tmp_path):
    """On the simulation's clock: a load takes as long as the slower of the two, and what comes before and after."""
    nbytes = write_llama(tmp_path / "ckpt", layers=2, hidden=512, ffn=1024, vocab=2048)
    real = Gatherer.gather
    for reading, copying in ((1.0, 1.0), (3.0, 1.0), (1.0, 3.0)):
        device = Simulated(cost=copying)

        def gather(self, *args, device=device, reading=reading):
            device.log.append(("read", device.now))
            device.now += reading
            return real(self, *args)

        monkeypatch.setattr(Gatherer, "gather", gather)
        patch_device(monkeypatch, device)
        assert load(tmp_path / "ckpt", Layout(), 0, device="cuda", threads=1).report.nbytes >= nbytes // 2
        tiles = sum(what == "read" for what, _ in device.log)
        assert tiles > 12
        assert device.now <= tiles * max(reading, copying) + 3 * min(reading, copying)
        kinds = [what for what, _ in device.log]
        assert kinds[:3] == ["read", "read", "copy"]  # both slots are under way before the first is waited for
        before = kinds.index("copy")
        assert all(kinds[: n + before].count("read") > kinds[: n + before].count("copy") for n in range(tiles))


def test_without_overlap_the_clock_tells(monkeypatch, tmp_path):
    """The negative control of the test above: one slot."""
    write_llama(tmp_path / "ckpt", layers=2, hidden=512, ffn=1024, vocab=2048)
    device, real = Simulated(cost=1.0), Gatherer.gather
    tiles = itertools.count()

    def gather(self, *args):
        next(tiles)
        device.now += 1.0
        return real(self, *args)

    monkeypatch.setattr(Gatherer, "gather", gather)
    monkeypatch.setattr(device_module, "_SLOTS", 1)
    patch_device(monkeypatch, device)
    load(tmp_path / "ckpt", Layout(), 0, device="cuda", threads=1)
    assert device.now == 2 * next(tiles)


# ---------------------------------------------------------------------- bytes and memory


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A checkpoint with rows long memory_errors to be halved, TP 2."""
    folder = tmp_path_factory.mktemp("big") / "ckpt"
    write_llama(folder, layers=2, hidden=512 * SCALE, ffn=1024 * SCALE, vocab=2048 * SCALE, tp=2, pp=1)
    return folder


def test_more_tensor_parallel_ranks_read_no_more(big, monkeypatch):
    seen = {"bytes": 0}
    real = os.preadv

    def counted(fd, buffers, offset):
        n = real(fd, buffers, offset)
        seen["bytes"] += n
        return n

    monkeypatch.setattr(os, "preadv", counted)
    total, whole = 0, load(big, Layout(), 0)
    for rank in range(4):
        seen["bytes"] = 0
        state = load(big, Layout(tp=4), rank)
        assert seen["bytes"] == state.report.bytes_read == state.report.bytes_needed
        assert state.report.records_unchecked
        total += state.report.bytes_read
        columns = state["decoder.layers.1.mlp.linear_fc2.weight"]
        assert torch.equal(columns, whole["decoder.layers.1.mlp.linear_fc2.weight"][:, 256 * rank : 256 * rank + 256])
    assert total < 1.02 * whole.report.nbytes  # norms are on every rank


def test_what_is_read_in_part_is_checked_on_request(big, tmp_path):
    folder = tmp_path / "ckpt"
    shutil.copytree(big, folder)
    name, path, offset, _ = next(p for p in payloads(folder) if p[0].endswith("1.mlp.linear_fc2.weight"))
    flip(path, offset + 2 * 511)  # the end of the first row of the first half: the second of four ranks has it
    assert load(folder, Layout(tp=4), 0).report.records_unchecked
    with pytest.raises(IntegrityError, match="do not match their checksum") as caught:
        load(folder, Layout(tp=4), 0, verify="all")
    assert caught.value.tensor == name
    assert "published" not in caught.value.hint
    report = load(big, Layout(tp=4), 0, verify="all").report
    assert report.records_unchecked == 0
    assert report.bytes_read > 1.5 * report.bytes_needed
    with pytest.raises(IntegrityError):
        load(folder, Layout(), 0)


def test_a_few_rows_of_padding_are_read_for_their_checksum(tmp_path):
    """The vocabulary was padded for more ranks: with its last five rows the record is whole."""
    write_llama(tmp_path / "ckpt", layers=1, hidden=64, ffn=64, vocab=25605, tp=1, pp=1)
    for stream in (False, True):
        source = load(tmp_path / "ckpt", Layout(), 0, stream=stream)
        state = dict(source)
        report = source.report
        assert state["embedding.word_embeddings.weight"].shape == (25600, 64)
        assert report.records_unchecked == 0
        assert report.bytes_read == report.bytes_needed + 2 * 5 * 64 * 2
    for rank, rows in ((0, 0), (1, 5)):
        report = load(tmp_path / "ckpt", Layout(tp=2), rank).report
        assert report.bytes_read == report.bytes_needed + 2 * rows * 64 * 2


def test_a_flipped_byte_anywhere_is_found(tmp_path):
    folder = copy_golden("llama_adam_tp2pp2", tmp_path / "ckpt")
    for number, (_, path, offset, size) in enumerate(payloads(folder, "weight")):
        if number % 4 == 0:
            flip(path, offset + size // 2)
            for stream in (False, True):
                with pytest.raises(IntegrityError, match="checksum"):
                    dict(load(folder, Layout(), 0, stream=stream, vocab_size=128))
            flip(path, offset + size // 2)
    assert load(folder, Layout(), 0)


def test_memory_stays_within_the_budget(tmp_path):
    """A child process streams a checkpoint of 184 MiB and keeps nothing of it."""
    nbytes = write_llama(tmp_path / "ckpt", layers=4, hidden=1024, ffn=4096, vocab=16384, tp=2, pp=1)
    code = """
import re, sys, threading, time
import torch
from pathlib import Path
from converters import Layout, load
torch.zeros(1).add(1)
peak, over = 0, threading.Event()
def now():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
def watch():
    global peak
    while not over.wait(0.002):
        peak = max(peak, now())
load(sys.argv[1], Layout(), 0, stream=True).close()
base = now()
thread = threading.Thread(target=watch); thread.start()
for name, tensor in load(sys.argv[1], Layout(), 0, stream=True, max_memory=32 << 20):
    del tensor
over.set(); thread.join()
print(peak - base)
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "ckpt"], capture_output=True, text=True, check=True, env=environment
    )
    assert nbytes > 180 << 20
    # buffers, what is read ahead and one tensor more, the largest is 32 MiB
    assert int(done.stdout) < (32 + 32 + 3 * 32 + 16) << 20


# ---------------------------------------------------------------------- streams


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("load-")]


def test_a_stream_gives_everything_and_leaves_nothing(big):
    want = load(big, Layout(tp=2), 1)
    seen = []
    with load(big, Layout(tp=2), 1, stream=True, max_memory=4 << 20) as stream:
        for name, tensor in stream:
            seen.append(name)
            assert tensor is None or torch.equal(tensor, want[name])
    assert sorted(seen) == sorted(want)
    assert stream.report.bytes_read == stream.report.bytes_needed == want.report.bytes_read
    assert threads() == []


@pytest.mark.parametrize("how", ["close", "forget", "raise"])
def test_a_stream_may_be_left_early(big, how):
    stream = load(big, Layout(), 0, stream=True)
    next(stream)
    assert threads() != [] or how
    if how == "close":
        stream.close()
    elif how == "forget":
        del stream
    else:
        with pytest.raises(ZeroDivisionError), stream:
            raise ZeroDivisionError
    assert threads() == []


def test_a_stream_does_not_run_ahead(big):
    """What is begun and not taken stays below the limit, or is one tensor for each thread."""
    made = []

    class Counting(Device):
        def empty(self, dtype, shape):
            made.append(tuple(shape))
            return super().empty(dtype, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("converters.loading.state.find_device", lambda *_: Counting())
        source, begin = iter_tensors(big, "decoder.layers.*", ahead=None, threads=2), time.monotonic()
        next(source)
        wait_until(lambda: len(made) > 4)
        source.close()
        made.clear()
        enough_time = 3 * (time.monotonic() - begin)
        source = iter_tensors(big, "decoder.layers.*", ahead=1, threads=2)
        next(source)
        time.sleep(enough_time)
        assert len(made) <= 4
        source.close()


def test_what_goes_wrong_in_a_thread_is_raised_in_the_caller(big, monkeypatch):
    calls = itertools.count()
    real = Gatherer.gather

    def failing(self, *arguments):
        if next(calls) == 3:
            raise ZeroDivisionError("in a thread")
        return real(self, *arguments)

    monkeypatch.setattr(Gatherer, "gather", failing)
    for stream in (False, True):
        calls = itertools.count()
        with pytest.raises(ZeroDivisionError, match="in a thread"):
            list(load(big, Layout(), 0, stream=stream))
        assert threads() == []


def test_a_load_can_be_stopped(big):
    stop, seen = StopFlag(), []

    def listener(event):
        seen.append(event)
        if isinstance(event, Moved):
            stop.set(15)

    with pytest.raises(Interrupted) as caught:
        load(big, Layout(), 0, stop=stop, listener=listener, threads=1)
    assert caught.value.signum == 15
    assert isinstance(seen[0], PlanReady)
    assert threads() == []


def test_fp8_state_is_spoken_of_and_left_out():
    """It is a pickle, which TransformerEngine's modules would execute."""
    for name, left in (("llama_adam_tp2pp2", True), ("llama_localspec_weights_tp2pp2", False)):
        reader = open_checkpoint(golden(name))
        assert not any("FP8" in note for note in plan_load(reader, Layout(), 0).notes)
        reader.catalog.args["fp8"] = "hybrid"
        plan = plan_load(reader, Layout(), 0)
        assert any("FP8 scaling factors" in note for note in plan.notes) == left
        assert all(key.endswith("._extra_state") for key in plan.empty)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (Layout(tp=3), {}, "heads cannot be split over --tp 3"),
        (Layout(pp=3), {}, "cannot be spread evenly over --pp 3"),
        (Layout(tp=2), {"rank": 2}, "there is no rank 2: the job has 2"),
        (Layout(tp=2), {"rank": -1}, "there is no rank -1"),
        (Layout(tp=2), {"rank": None}, "whose tensors"),
        (Layout(), {"device": "cuda:99"}, "there is no device cuda:99"),
        (Layout(), {"device": "tpu"}, "unknown device"),
        (Layout(), {"max_memory": 1000}, "max_memory of 1,000 bytes is too small"),
        (Layout(), {"names": "nemo"}, "there are no names"),
        (Layout(tp=2), {"names": "hf"}, "no names for parts"),
        (Layout(), {"names": "hf", "optimizer": True}, "no names for optimizer state"),
        (Layout(), {"broadcast": "maybe"}, "broadcast is 'maybe'"),
        (Layout(), {"dtype": "int8"}, "cannot cast"),
    ],
)
def test_refused_before_anything_is_read(layout, options, message, monkeypatch):
    monkeypatch.setattr(Gatherer, "gather", lambda *_: pytest.fail("something was read"))
    with pytest.raises(RequestError, match=re.escape(message)):
        load(golden("llama_adam_tp2pp2"), layout, **{"rank": 0, **options})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layout": 2}, "load needs a Layout, such as Layout(tp=2, dp=4), in place of 2"),
        ({"rank": "0"}, "rank is '0', not a whole number"),
        ({"max_memory": "64MiB"}, "max_memory is '64MiB', not a whole number"),
        ({"threads": "2"}, "threads is '2', not a whole number"),
        ({"modules": "te"}, "modules is 'te', not a converters.param_order.Order"),
    ],
)
def test_arguments_of_other_types_are_named(wrong, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        load(golden("llama_adam_tp2pp2"), **{"layout": Layout(), "rank": 0, **wrong})


@pytest.mark.parametrize("sizes", [{"tp": "2"}, {"pp": 2.0}, {"dp": None}, {"vpp": "2"}])
def test_sizes_of_a_layout_are_whole_numbers(sizes):
    ((name, value),) = sizes.items()
    with pytest.raises(TypeError, match=f"{name} of a Layout is {value!r}, not a whole number"):
        Layout(**sizes)
    assert Layout(tp=np.int64(2), vpp=None).world_size == 2


def test_devices_and_types_of_torch_are_taken():
    state = load(golden("llama_adam_tp2pp2"), Layout(), 0, device=torch.device("cpu"), dtype=torch.float16)
    assert {value.dtype for value in state.values() if value is not None} == {torch.float16}


def test_the_hint_of_a_damaged_record_is_one_for_readers(tmp_path):
    """Not for who writes files; also where weights are compared with the optimizer's buckets, before the load begins."""
    folder = copy_golden("llama_dpreshardable_tp2pp2dp2", tmp_path / "ckpt")
    _, path, offset, size = payloads(folder, "weight")[0]
    flip(path, offset + size // 2)
    for optimizer in (False, True):
        with pytest.raises(IntegrityError, match="checksum") as caught:
            load(folder, Layout(), 0, optimizer=optimizer)
        assert caught.value.hint == "restore this file from a copy, or use another iteration"


def test_help_names_what_else_there_is():
    for name in ("load_common", "load_metadata", "iter_tensors", "load_plain_tensors", "names the ranks"):
        assert name in load.__doc__
    assert "top of this file" not in load.__doc__


def test_no_optimizer_to_load():
    with pytest.raises(RequestError, match="no optimizer state"):
        load(golden("qwen2_weights_tp2pp2"), Layout(), 0, optimizer=True)


def test_too_little_memory_is_an_error_with_the_numbers(big, monkeypatch):
    monkeypatch.setattr(Gatherer, "gather", lambda *_: pytest.fail("something was read"))
    monkeypatch.setattr(device_module, "free_memory", lambda: 5 << 20)
    with pytest.raises(RequestError, match=r"cpu has 5 MiB free, rank 0 needs \d+ MiB") as caught:
        load(big, Layout(), 0)
    assert "bytes of tensors" in caught.value.details[0]
    monkeypatch.setattr(device_module, "free_memory", lambda: 1 << 30)
    with pytest.raises(pytest.fail.Exception):
        load(big, Layout(), 0)


def test_memory_that_runs_out_later_is_an_error_in_our_words():
    with pytest.raises(RequestError, match=r"cpu is out of memory: \(1125899906842624,\) elements of float32"):
        Device().empty("float32", (1 << 50,))
    texts = {
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."): "cuda:0 is out of memory: CUDA out",
        RuntimeError("CUDA error: out of memory\nCompile with"): "cuda:0 is out of memory: CUDA error: out of memory",
        MemoryError(): "cuda:0 is out of memory",
    }
    for error, text in texts.items():
        with pytest.raises(RequestError, match=text), memory_errors("cuda:0"):
            raise error
    with pytest.raises(RuntimeError, match="misaligned"), memory_errors("cuda:0"):
        raise RuntimeError("CUDA error: misaligned address")


def test_what_has_arrived_is_told_before_its_slot_is_needed(monkeypatch):
    monkeypatch.setattr(device_module, "_SLOTS", 8)
    device, done = Simulated(), []
    lane = device.lane(64)
    for number in range(3):
        lane.run(lambda into: into.fill(7), 64, done=lambda number=number: done.append(number))
    lane._slots[1].event.synchronize()  # and so the one before it
    lane.run(lambda into: into.fill(7), 64, done=lambda: done.append(3))
    assert done == [0, 1]
    lane.flush()
    assert done == [0, 1, 2, 3]


def test_threads_and_memory_are_those_that_a_gpu_needs(simulated, monkeypatch, big):
    """Sixteen threads within its own budget; the cores are shared by the ranks of a machine."""
    taken = []
    monkeypatch.setattr("converters.loading.run.Loading", lambda *_, threads, **__: taken.append(threads))
    monkeypatch.setattr("converters.io.memory.cores", lambda: 64)
    for local, want in ((None, [8, 16]), ("8", [8, 8])):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local or "1")
        for device in ("cpu", "cuda"):
            with pytest.raises(AttributeError):  # the threads are not there
                load(big, Layout(), 0, device=device)
        assert taken == want
        taken.clear()
    with pytest.raises(RequestError, match="max_memory of 0 bytes is too small"):
        load(big, Layout(), 0, device="cuda", max_memory=0)


def test_elements_that_do_not_change_are_moved_as_integers(monkeypatch):
    """Not every type has a kernel on every device, and of a NaN every bit stays."""
    moved = []
    real = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *more, **to: (moved.append(self.dtype), real(self, *more, **to))
    )
    bits = torch.tensor([[0x7FC1, 0x1, 0xFF81], [0, 3, 0x7F81]], dtype=torch.int32).to(torch.int16)
    for name in ("bfloat16", "float16", "float8_e8m0fnu", "uint16", "bool"):
        values = bits.view(torch.uint8).to(torch.bool) if name == "bool" else bits.view(getattr(torch, name))
        out = torch.zeros(values.shape[::-1], dtype=values.dtype)
        apply(values.T, out, Op.TRANSPOSE)
        assert moved.pop() in (torch.uint8, torch.int16)
        assert torch.equal(bytes_of(out.T), bytes_of(values))


def test_a_slice_of_a_gpu_is_no_gpu_of_its_own():
    """NCCL compares places on the bus: two slices of one GPU have the same, whatever their UUIDs."""
    whole = types.SimpleNamespace(name="NVIDIA H100", uuid="a", pci_domain_id=0, pci_bus_id=24, pci_device_id=0)
    assert serial_of(whole) == "0:24:0"
    assert serial_of(types.SimpleNamespace(name="NVIDIA A100", uuid="b")) == "b"
    assert serial_of(types.SimpleNamespace(**vars(whole) | {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"})) == ""


def test_which_gpu(monkeypatch):
    """Two GPUs, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("converters.io.platforms.Cuda", lambda index: index)
    assert [find_device("cuda", rank) for rank in (0, 1)] == [0, 1]
    assert find_device("cuda:1", 7) == 1
    for name, rank, message, hint in (
        ("cuda", 2, "no device cuda:2: this machine has 2", "one process for each GPU"),
        ("cuda:2", 0, "no device cuda:2: this machine has 2", "cuda:0 to cuda:1"),
        ("cuda:", 0, "unknown device 'cuda:'", "cuda:N"),
        ("cuda:\u00b2", 0, "unknown device", "cuda:N"),
        ("mps", 0, "unknown device 'mps'", "cuda:N"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            find_device(name, rank)
        assert hint in caught.value.hint
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # torch.cuda.set_device(1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert find_device("cuda", 0) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # a launcher that shows each process its own
    assert find_device("cuda", 5) == 0


def test_auto_is_the_host_where_a_gpu_cannot_be_used(monkeypatch):
    def busy(index):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors")

    monkeypatch.setattr("converters.io.platforms._DRIVERS", ("null",))  # /dev/null
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("converters.io.platforms.Cuda", busy)
    assert gpu_of(0) is None
    assert choose_device("auto", computes=True) == ("cpu", None)
    with pytest.raises(RequestError, match="cuda:0 cannot be used: CUDA error: all CUDA-capable devices are busy"):
        find_device("cuda")


def test_which_gpu_without_a_launcher(monkeypatch):
    """torchrun sets LOCAL_RANK: `iter_tensors` takes that GPU, too."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    names = []
    monkeypatch.setattr("converters.loading.state.find_device", lambda *name: names.append(name) or Device())
    iter_tensors(golden("llama_adam_tp2pp2"), device="cuda")
    assert names == [("cuda", 1)]


def test_the_kernel_says_how_much_is_free():
    assert 1 << 20 < free_memory() < 1 << 50


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(FormatError):
        load(tmp_path, Layout(), 0)


# ---------------------------------------------------------------------- what people used Megatron's calls for


def test_common_state_is_plain():
    from argparse import Namespace

    common = load_common(golden("llama_adam_tp2pp2"))
    assert isinstance(common["args"], Namespace)
    assert common["args"].params_dtype is torch.bfloat16
    assert common["args"].attention_backend == "AttnBackend(5)"
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(group["step"], group["weight_decay"], group["betas"]) for group in groups] == [
        (2, 0.1, (0.9, 0.95)),
        (2, 0.0, (0.9, 0.95)),
    ]
    for name in ("v019_llama_fullyreshardable_tp2dp2", "v009_zarr_llama_adam_tp2pp2", "legacy_gpt_adam_tp2pp2"):
        assert load_common(path_of(name))["args"].num_layers == 2


def test_metadata_and_plain_tensors():
    known = truth("llama")
    meta = load_metadata(golden("llama_adam_tp2pp2"))
    assert meta["decoder.layers.1.mlp.linear_fc1.weight"].shape == (96, 32)
    tensors = load_plain_tensors(golden("llama_adam_tp2pp2"), ["decoder.layers.*", "*final*"])
    assert len(tensors) == 13
    for name, tensor in tensors.items():
        assert np.array_equal(bits(tensor), known[f"model/{name}"])
    flat = load_plain_tensors(
        golden("llama_dpreshardable_tp2pp2dp2"), "optimizer.state.exp_avg.decoder.*", optimizer=True
    )
    assert len(flat) == 13
    for name, tensor in flat.items():
        assert np.array_equal(bits(tensor), known["exp_avg/" + name.removeprefix("optimizer.state.exp_avg.")])
    for names, options, hint in (
        ("nothing", {}, "load_metadata lists them"),
        ("optimizer.*", {}, "optimizer=True gives optimizer state, too"),
        ("optimizer.nothing", {"optimizer": True}, "load_metadata lists them"),
    ):
        with pytest.raises(RequestError, match=re.escape(f"no tensor is called {names}")) as caught:
            load_plain_tensors(golden("llama_adam_tp2pp2"), names, **options)
        assert caught.value.hint == hint


def test_importing_the_package_imports_little():
    code = """
import sys, converters
heavy = {"torch", "numpy", "typer", "rich", "click", "transformers", "tensorstore"}
print(sorted(heavy & set(sys.modules)))
from converters import load, Layout, iter_tensors, load_common
print(sorted(heavy & set(sys.modules)))
assert callable(load) and "load" in dir(converters)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout.split("\n")[:2] == ["[]", "['numpy']"]
    with pytest.raises(AttributeError):
        __import__("converters").no_such_thing  # noqa: B018
    assert issubclass(DistckptError, Exception)


# ---------------------------------------------------------------------- with a GPU


@pytest.mark.gpu
def test_a_gpu_holds_the_result_and_a_few_tiles(big):
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    state = load(big, Layout(), 0, device="cuda:0", dtype="fp32", threads=2)
    peak = torch.cuda.max_memory_allocated(0) - before
    assert peak <= state.report.nbytes + 2 * 2 * 3 * (8 << 20)


@pytest.mark.gpu
def test_too_little_memory_on_a_gpu(big, monkeypatch):
    monkeypatch.setattr(Gatherer, "gather", lambda *_: pytest.fail("something was read"))
    monkeypatch.setattr(Cuda, "room", lambda self: 1 << 20)
    with pytest.raises(RequestError, match="cuda:0 has 1 MiB free"):
        load(big, Layout(), 0, device="cuda:0")
