"""Several hundred hostile checkpoints through every command, watched: nothing runs, hangs, leaks, or reaches the terminal.

A part of them here; with `--all` every input with every command, some twenty minutes of one core. `python -m hostile` in
`tests/` does the same and prints the counts of each group.
"""

from __future__ import annotations

import contextlib
import gc
import os
import zlib

import pytest

from converters import load_metadata
from converters.errors import DistckptError
from hostile.corpus import Case, cases, copied, fired
from hostile.runs import COMMANDS, Server, Tally, attack

CASES = cases()
READING = [name for name in COMMANDS if name.startswith(("inspect", "verify", "diff"))]
SHARES = 2


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.close()


def test_there_are_enough():
    assert len(CASES) >= 700
    wanted = "pickle bomb zip tensor dcp safetensors tar zarr text tree crowd name"
    assert {case.group for case in CASES} == set(wanted.split())
    assert len(COMMANDS) >= 20


def chosen(case: Case) -> list[str]:
    """One command for each case: over all cases, all of them in turn; `verify` for every second."""
    number = zlib.crc32(case.title.encode())
    return ["verify"] if number % 2 else [list(COMMANDS)[number // 2 % len(COMMANDS)]]


@pytest.mark.parametrize("share", range(SHARES))
def test_a_part_of_them(share, server, tmp_path):
    """Every sixth input, so that no group is left out; the whole is `test_everything`."""
    tally = Tally()
    for number, case in enumerate(CASES):
        if case.group not in ("bomb", "crowd") and number % 6 == 0 and number // 6 % SHARES == share:
            attack(server, case, chosen(case), tmp_path / str(number), tally)
    assert tally.wrong == []
    assert tally.runs > 40
    assert tally.codes.get(3, 0) > tally.runs // 4  # they are refused, not overlooked


FOUND = {
    "dcp: 60,000 chunks at one place": "verify",
    "name: weight of torch_dist": "reshard plan",
    "name: moment of torch_dist": "convert to torch",
    "tree: arguments: a list of itself": "convert to torch",
    "tree: arguments: all a graph of 10^40 paths": "reshard plan",
    "dcp: expert 10^12": "reshard plan",
    "dcp: layer 10^9": "convert to torch",
    "zarr: chunk that is a link to outside": "verify",
    "tree: a file of torch_dist is a link to outside": "convert to torch",
    "tree: a rank's folder is a link to outside": "inspect",
    "tree: an iteration is a link to outside": "load",
    "bomb: deep list in metadata of torch_dist": "inspect",
    "crowd: chunks in steps": "inspect",
    "crowd: lists in run_config.yaml": "inspect",
    "text: billion laughs in run_config.yaml": "reshard plan",
    "text: wrong types in config.json": "export-hf reference",
}
"""What the whole has found: these run every time."""


def test_what_was_found_before(server, tmp_path):
    tally = Tally()
    for case in CASES:
        if case.title in FOUND:
            attack(server, case, [FOUND[case.title]], tmp_path / case.title.replace("/", ""), tally)
    assert tally.wrong == []
    assert tally.runs == len(FOUND)


def test_what_was_refused_is_let_go(tmp_path):
    """A trainer that goes on after a broken checkpoint has its memory back at once: no error holds itself in a circle."""
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / ".metadata").write_bytes(b"\x80\x04]].")
    (tmp_path / "ckpt" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    gc.collect()  # other tests may keep errors of theirs
    kept = {id(found) for found in gc.get_objects() if issubclass(type(found), DistckptError)}
    gc.disable()
    try:
        with contextlib.suppress(DistckptError):
            load_metadata(tmp_path / "ckpt")
        assert not any(issubclass(type(found), DistckptError) and id(found) not in kept for found in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("group", sorted({case.group for case in CASES}))
def test_everything(group, server, tmp_path):
    tally = Tally()
    mine = [case for case in CASES if case.group == group]
    for number, case in enumerate(mine):
        attack(server, case, COMMANDS, tmp_path / str(number), tally)
    print(f"{group}: {tally}")
    assert tally.wrong == []
    assert tally.runs == len(mine) * len(COMMANDS)


# ---------------------------------------------------------------------- controls: what is watched would be seen

# torch DCP reads tensors with weights_only; of the common state only what the caller asks for
SPARED = ("tensor in distcp", "common_state of 0.19")
PAYLOADS = [c for c in CASES if c.group == "pickle" and c.rival and "posix.system alone" in c.name]
PAYLOADS = [c for c in PAYLOADS if not c.name.endswith(SPARED)]


@pytest.mark.parametrize("case", PAYLOADS, ids=lambda case: case.name)
def test_payloads_fire_in_torch(case, server, tmp_path):
    """The same files, opened as people open them: `torch.load` of a file, torch DCP of a folder."""
    marker = tmp_path / "marker"
    case.make(tmp_path, marker)
    kind, where = case.rival
    server.run(
        argv=["rival", kind, str(tmp_path / "ckpt" / where)],
        answer=os.devnull,
        log=tmp_path / "log",
        writable=[],
        forbidden=[],
    )
    assert fired(marker), (tmp_path / "log").read_text()[-500:]


@pytest.mark.parametrize(
    "evil",
    [
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.socket()",
        "import antigravity",
        "import pickle; pickle.loads(b'cos\\ngetcwd\\n.')",
        "exec(compile('1', 'x', 'exec'))",
        "open(PLACE + '/evil', 'w')",
        "open(PLACE + '/outside/secret')",
        "import os; os.mkdir(PLACE + '/evil')",
        "import os; os.symlink('a', PLACE + '/evil')",
    ],
)
def test_the_watch_sees(evil, tmp_path):
    """Each of these is refused; none would be found by looking at the files alone."""
    import subprocess
    import sys
    from pathlib import Path

    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").touch()
    tests = str(Path(__file__).parents[1])
    program = (
        f"import sys, pickle, socket, subprocess; sys.path.insert(0, {tests!r})\n"
        f"from pathlib import Path\nfrom hostile.watch import Violation, watch\nPLACE = {str(tmp_path)!r}\n"
        f"def run():\n    {evil}\n"
        f"seen, stop = watch([Path(PLACE) / 'fine'], [Path(PLACE) / 'outside'])\n"
        "try:\n    run()\nexcept Violation:\n    stop()\n    print(seen[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert len(done.stdout) > 5, done.stdout + done.stderr
    assert not (tmp_path / "evil").exists()


def test_a_good_checkpoint_is_not_refused(server, tmp_path):
    """Nothing in the above is refused for being watched, or for the frame around it."""
    from hostile.corpus import GOOD

    good = Case("good", "as it is", lambda folder, _: copied(GOOD, folder / "ckpt"), refused=False)
    tally = Tally()
    attack(
        server, good, [name for name in COMMANDS if name not in ("export-hf reference", "load")], tmp_path / "a", tally
    )
    assert tally.wrong == []
    assert tally.codes == {0: tally.runs}


def test_a_tally_counts_what_is_wrong(server, tmp_path):
    """A command that fails in a way that it must not, and a file that changes, are both counted."""
    good = Case("good", "refused by mistake", lambda folder, _: copied("dcp_plain", folder / "ckpt"), refused=True)
    tally = Tally()
    attack(server, good, ["verify"], tmp_path / "a", tally)
    assert any("verify found nothing" in text for text in tally.wrong), tally
