"""Ranks that are killed or stopped in every phase; and what ranks share, say and agree on when nothing goes wrong."""

import itertools
import shutil
import signal

import pytest

from harness.checkpoints import golden, tree, write_llama

SOURCE = golden("llama_dpreshardable_buckets_tp2dp2")  # whose optimizer state is proved before it is written
WRITING = ("planning", "proof", "working", "checking", "publishing")
LOOKING = ("planning", "looking", "answering")
TILES = ("--max-memory", "256KiB")  # so small that there is work for both


def argv_of(command, into):
    return {
        "reshard": ["reshard", SOURCE, into, "--tp", "4", "--progress", "off", *TILES],
        "verify": ["verify", SOURCE, "--progress", "off"],
        "diff": ["diff", SOURCE, SOURCE, "--progress", "off"],
    }[command]


@pytest.fixture(scope="module")
def resharded(server, memory):
    into = memory() / "out"
    assert server.together([{"argv": argv_of("reshard", into)}])[0].code == 0
    return tree(into)


EVERY = [
    (command, phase, victim, action)
    for command, phases in (("reshard", WRITING), ("verify", LOOKING), ("diff", LOOKING))
    for phase, victim, action in itertools.product(phases, (0, 1), ("KILL", "STOP"))
]
SAMPLE = {
    ("reshard", "planning", 0, "KILL"),
    ("reshard", "proof", 1, "STOP"),
    ("reshard", "working", 0, "STOP"),
    ("reshard", "working", 1, "KILL"),
    ("reshard", "checking", 1, "STOP"),
    ("reshard", "publishing", 0, "KILL"),
    ("reshard", "publishing", 1, "STOP"),
    ("verify", "looking", 0, "KILL"),
    ("verify", "answering", 0, "KILL"),
    ("diff", "looking", 1, "STOP"),
}


def id_of(case):
    return "-".join(map(str, case))


@pytest.mark.parametrize(
    ("command", "phase", "victim", "action"),
    [pytest.param(*case, id=id_of(case), marks=() if case in SAMPLE else pytest.mark.slow) for case in EVERY],
)
def test_a_rank_is_lost(server, memory, resharded, command, phase, victim, action):
    """The other one ends in time and says which; the result is there or not; the same command completes it."""
    into, other = memory() / "out", 1 - victim
    argv = argv_of(command, into)
    run = {"phase": [phase, action]}
    if (
        action == "STOP" or phase == "planning"
    ):  # only its silence tells; the victim itself gives the other all its time
        run["env"] = {"DISTCKPT_RANK_TIMEOUT": "20"}
    env = {"DISTCKPT_RANK_TIMEOUT": "1" if "env" in run else "60"}
    ended = server.ranks(2, argv, {victim: run}, constants={"execute.rank_sync._ARRIVAL": 2}, env=env)
    text = "".join(run.text for run in ended)
    assert "Traceback" not in text
    assert "internal error" not in text
    if action == "KILL":
        assert ended[victim].code == -signal.SIGKILL, text
    else:
        assert ended[victim].code in (0, 143), (
            text
        )  # it woke up, and did not go on; rank 0 may finish what was complete
    if ended[other].code:
        assert ended[other].code == 143
        assert "stopped rank " in ended[other].text or "stopped rank " in ended[0].text, text
        assert f"rank {victim}" in ended[other].text + ended[0].text
    else:  # only once nothing depended on it any more
        assert (phase, victim) in {("answering", 1), ("publishing", 1)}
    if command != "reshard":
        assert not into.exists()
        return
    complete = into.exists()
    assert ended[0].code or complete
    assert not complete or tree(into) == resharded
    if not complete:
        again = server.ranks(2, argv)
        assert [run.code for run in again] == [0, 0], again
        assert tree(into) == resharded
        assert [path.name for path in into.parent.iterdir()] == ["out"]


def test_a_disturbance_really_happens(server, tmp_path):
    """Negative control: each phase is reached."""
    for command, phases in (("reshard", WRITING), ("verify", LOOKING)):
        for phase in phases:
            ended = server.together([{"argv": argv_of(command, tmp_path / "out"), "phase": [phase, "KILL"]}])
            assert ended[0].code == -signal.SIGKILL, phase
            shutil.rmtree(tmp_path / ".out.distckpt-partial", ignore_errors=True)


# ---------------------------------------------------------------------- what they share


@pytest.fixture(scope="module")
def llama(memory):
    """A Llama of 32 MB and a copy of it."""
    root = memory()
    nbytes = write_llama(root / "src")
    shutil.copytree(root / "src", root / "same")
    return root, nbytes


SHARED = {
    "verify": ("verify", "SRC"),
    "values": ("verify", "SRC", "--values"),
    "diff": ("diff", "SRC", "SAME"),
    "reshard": ("reshard", "SRC", "DST", "--tp", "4"),
    "export-hf": ("export-hf", "SRC", "DST"),
    "torch_dist": ("convert", "SRC", "DST", "--to", "torch_dist", "--tp", "4"),
    "legacy": ("convert", "SRC", "DST", "--to", "legacy", "--tp", "4"),
    "torch": ("convert", "SRC", "DST", "--to", "torch"),
    "safetensors": ("convert", "SRC", "DST", "--to", "safetensors"),
}


@pytest.mark.parametrize("name", SHARED)
def test_the_ranks_share_the_reading(server, llama, memory, name):
    """Each reads its part and little else, one speaks, all agree, and the bytes are those of one process."""
    (root, nbytes), into, said = llama, memory(), {}
    for world in (1, 3):
        places = {"SRC": root / "src", "SAME": root / "same", "DST": into / str(world) / "out"}
        argv = [*(places.get(word, word) for word in SHARED[name]), "--progress", "off"]
        ended = server.ranks(world, argv) if world > 1 else server.together([{"argv": argv}])
        assert {run.code for run in ended} == {0}, ended
        assert not any(run.text for run in ended[1:])
        said[world] = ended
    alone = said[1][0].read
    assert alone >= nbytes
    for run in said[3]:
        assert run.read < alone / 3 + 0.25 * alone  # metadata is read by each, and so are shared records' other halves
        assert run.read > alone / 3 - 0.2 * alone
    if "DST" in SHARED[name]:
        one, three = (into / world / "out" for world in "13")
        assert (tree(one) if one.is_dir() else one.read_bytes()) == (
            tree(three) if three.is_dir() else three.read_bytes()
        )
    shutil.rmtree(into)


@pytest.mark.parametrize("world", [1, 3])
def test_the_ranks_agree_that_the_answer_is_no(server, llama, world):
    argv = ["diff", llama[0] / "src", SOURCE, "--progress", "off"]
    ended = server.ranks(world, argv) if world > 1 else server.together([{"argv": argv}])
    assert {run.code for run in ended} == {1}
    assert not any(run.text for run in ended[1:])
