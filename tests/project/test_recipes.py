"""The recipes in scripts/: every new iteration of a training run, on Slurm, in CI, on several hosts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distckpt_cli.app import main
from harness.checkpoints import GOLDEN, copy_golden, run_cli, tree
from harness.cli_support import ROOT, Ran, environment, here
from harness.processes import finish, start, wait_until

RECIPES = ROOT / "scripts" / "recipes"


@pytest.fixture
def training(tmp_path):
    """A training run with two complete iterations and one that is still being written."""
    run = tmp_path / "run"
    for number in (10, 20, 30):
        copy_golden("llama_adam_tp2pp2", run / f"iter_{number:07d}")
    next((run / "iter_0000030").glob("*.distcp")).unlink()
    (run / "latest_checkpointed_iteration.txt").write_text("20\n")
    (run / "notes").mkdir()
    return run


@pytest.fixture
def watched(capfd):
    """Function that runs `watch --once`, in this process, and what it starts; returns its code and all that they print."""

    def watch(run, out, *words, command=("export-hf", "--progress", "off")):
        code = main(["watch", "--once", *map(str, (*words, run, out)), "--", *map(str, command)])
        return Ran(code, *capfd.readouterr())

    return watch


def test_each_complete_iteration_is_converted_once(training, watched, tmp_path):
    out = tmp_path / "out"
    first = watched(training, out)
    assert first.code == 0, first.err
    assert sorted(p.name for p in out.iterdir()) == [".distckpt-watch", "iter_0000010", "iter_0000020"]
    assert "2 new of 2" in first.out
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    second = watched(training, out)
    assert second.code == 0
    assert "0 new of 2" in second.out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    # its job finishes another one, and it was damaged on the way
    (training / "latest_checkpointed_iteration.txt").write_text("30")
    third = watched(training, out)
    assert third.code == 1
    assert "iter_0000030" in third.err
    assert ".distcp is missing" in third.err
    assert not (out / "iter_0000030").exists()


def test_a_damaged_iteration_does_not_keep_the_others_waiting(training, watched, tmp_path):
    out = tmp_path / "out"
    # what fails for all of them fails once
    refused = watched(training, tmp_path / "other", command=("reshard", "--tp", 3))
    assert (refused.code, refused.err.count("error:")) == (4, 1)
    (out / "iter_0000020").mkdir(parents=True)  # somebody made it: nothing is in it
    next((training / "iter_0000010").glob("*.distcp")).unlink()
    done = watched(training, out)
    assert done.code == 1, done.err
    assert "1 new of 2" in done.out
    assert "failed: iter_0000010 (" in done.out
    assert (out / "iter_0000020" / "config.json").exists()


def test_what_is_no_training_run(watched, tmp_path):
    assert watched(tmp_path, tmp_path / "out").code == 3
    usage = here("watch", "--once")
    assert usage.code == 2
    assert "missing argument" in usage.err


# srun as far as distckpt sees it: the same command several times, each with its number
SRUN = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
while [ "${1#-}" != "$1" ]; do shift; done
pids=() code=0
for rank in 0 1; do
    SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_LOCALID=$rank SLURM_PROCID=$rank "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
"""


def test_slurm(training, tmp_path):
    bins, calls = tmp_path / "bin", tmp_path / "calls"
    bins.mkdir()
    for name, text in {"srun": SRUN, "scontrol": '#!/bin/sh\necho "scontrol $*" >> "$CALLS"\n'}.items():
        (bins / name).write_text(text)
        (bins / name).chmod(0o755)
    python = str(Path(sys.executable).parent)
    env = environment() | {"PATH": f"{bins}:{python}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_ID": "7"}
    for hidden in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(hidden, None)
    command = ["bash", RECIPES / "slurm.sbatch", training, tmp_path / "out", "reshard", "--tp", "4"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert calls.read_text().count("--kill-on-bad-exit=0 distckpt reshard") == 2
    assert run_cli("reshard", training / "iter_0000010", tmp_path / "one", "--tp", "4").returncode == 0
    assert tree(tmp_path / "out" / "iter_0000010") == tree(tmp_path / "one")
    # out of time: queued again
    shutil.rmtree(tmp_path / "out")
    (bins / "srun").write_text("#!/bin/sh\nexit 143\n")
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 143
    assert "scontrol requeue 7" in calls.read_text()


def test_github_actions(training, tmp_path):
    """The step that converts does so, as it stands in the file."""
    workflow = yaml.safe_load((RECIPES / "github-actions.yml").read_text())
    job = workflow["jobs"]["export"]
    step = next(step for step in job["steps"] if step.get("name") == "convert what is new")
    env = job["env"] | {"RUN": str(training), "OUT": str(tmp_path / "out")}
    python = str(Path(sys.executable).parent)
    everything = environment() | {k: str(v) for k, v in env.items()} | {"PATH": f"{python}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], env=everything, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "iter_0000020" / "config.json").is_file()


@pytest.fixture
def hosts():
    """Two hosts: network namespaces with a wire between them."""
    names = [f"distckpt-{os.getpid()}-{n}" for n in range(2)]
    wire = [f"dck{os.getpid() % 10000}{end}" for end in "ab"]
    commands = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", wire[0], "type", "veth", "peer", "name", wire[1]],
        *(["ip", "link", "set", end, "netns", name] for end, name in zip(wire, names, strict=True)),
    ]
    for n, (end, name) in enumerate(zip(wire, names, strict=True)):
        inside = ["ip", "-n", name]
        commands += [
            [*inside, "addr", "add", f"10.99.0.{n + 1}/24", "dev", end],
            [*inside, "link", "set", end, "up"],
            [*inside, "link", "set", "lo", "up"],
        ]
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_two_hosts(hosts, tmp_path):
    """torchrun on both, rendezvous over the wire, one file system: the bytes are those of one process."""
    args = ("reshard", str(GOLDEN / "mixtral_adam_ep2tp2"), str(tmp_path / "out"), "--tp", "2", "--pp", "2")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "10.99.0.1:29511", "--rdzv-id", "two")
    processes = []
    for n, host in enumerate(hosts):
        own = ("--nnodes", "2", "--nproc-per-node", "2", "--local-addr", f"10.99.0.{n + 1}", *rendezvous)
        own += ("--rdzv-conf", f"is_host={int(n == 0)}")  # there is no name service to find it out
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", *own]
        env = {k: v for k, v in environment().items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        processes.append(start([*command, "-m", "distckpt_cli", *args, "--max-memory", "256KiB"], env=env))
    said = finish(processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert "".join(out for out, _ in said).count("wrote ") == 1
    one = run_cli("reshard", *args[1:2], tmp_path / "one", *args[3:])
    assert one.returncode == 0, one.stderr
    assert tree(tmp_path / "out") == tree(tmp_path / "one")


def is_idle(pid):
    """Whether a process sleeps and waits for no other one."""
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return status == "S" and not Path(f"/proc/{pid}/task/{pid}/children").read_text()


def test_watch_waits_for_the_next_iteration_and_runs_a_command_on_each(training, tmp_path):
    """Until it is interrupted; then it says what it did."""
    out, seen = tmp_path / "out", tmp_path / "seen"
    command = [
        sys.executable,
        "-m",
        "distckpt_cli",
        "watch",
        training,
        out,
        "--every",
        "1",
        "--exec",
        f"echo $1 >> {seen}",
    ]
    tracker = training / "latest_checkpointed_iteration.txt"
    tracker.write_text("")  # a job that is just writing it
    process = start([*command, "--", "export-hf", "-q"], env=environment())
    tracker.write_text("10")
    wait_until((out / "iter_0000010").exists, process)
    tracker.write_text("20")
    wait_until(lambda: seen.exists() and len(seen.read_text().splitlines()) == 2 and is_idle(process.pid), process)
    process.terminate()
    ((text, _),) = finish([process])
    assert process.returncode == 143
    assert "2 new of 2 complete iterations" in text
    assert seen.read_text().splitlines() == [str(out / name) for name in ("iter_0000010", "iter_0000020")]


def test_watch_takes_no_other_results_for_its_own(training, watched, tmp_path):
    out = tmp_path / "out"
    (training / "latest_checkpointed_iteration.txt").write_text("10")
    slip = watched(training, out, command=("export-hf", "--silly"))
    assert (slip.code, "0 new of 1 complete iteration" in slip.out) == (2, True)
    assert watched(training, out).code == 0
    assert watched(training, out, command=("export-hf", "-q", "--threads", "1")).code == 0  # makes the same
    for command in (("export-hf", "--dtype", "fp32"), ("strip",)):
        other = watched(training, out, command=command)
        assert (other.code, "the results of another watch" in other.err) == (5, True)
        assert "distckpt export-hf of" in other.err
    copy_golden("llama_adam_tp2pp2", tmp_path / "mine" / "iter_0000010")
    strange = watched(training, tmp_path / "mine")
    assert (strange.code, "which this watch has not written" in strange.err) == (5, True)


def test_a_failed_exec_is_run_again(training, watched, tmp_path):
    (training / "latest_checkpointed_iteration.txt").write_text("10")
    out, flag, seen = tmp_path / "out", tmp_path / "flag", tmp_path / "seen"
    script = f"test -e {flag} && echo $1 >> {seen}"
    first = watched(training, out, "--exec", script)
    assert (first.code, "--exec failed: iter_0000010" in first.out) == (1, True)
    flag.touch()
    for _ in range(2):
        assert watched(training, out, "--exec", script).code == 0
    assert seen.read_text().splitlines() == [str(out / "iter_0000010")]


def test_json_and_silent_reach_the_command(training, watched, tmp_path):
    done = watched(training, tmp_path / "json", "--json", "--exec", "echo noise")
    document = json.loads(done.out)  # one, and nothing of the commands beside it
    assert {name: report["schema"] for name, report in document["reports"].items()} == {
        "iter_0000010": "distckpt.export-hf/1",
        "iter_0000020": "distckpt.export-hf/1",
    }
    silent = watched(training, tmp_path / "silent", "--silent")
    assert (silent.code, silent.out, silent.err) == (0, "", "")


def test_watch_runs_only_what_writes(training, watched, tmp_path):
    refused = watched(training, tmp_path / "out", command=["verify"])
    assert (refused.code, "not 'verify'" in refused.err) == (2, True)
