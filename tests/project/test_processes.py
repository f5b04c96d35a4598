"""What a test leaves behind does not reach another one."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.processes import PATIENCE, end_all, forget_failure, fork, is_alive, start, wait_until


def test_what_a_failed_test_had_open_fails_no_other_one(monkeypatch):
    """A warning that something was not closed is an error here, of whichever test runs when it is collected."""
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def fail():
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=subprocess.PIPE)
        pids.append(process.pid)
        raise ZeroDivisionError

    pids = []
    for forgets in (True, False):
        try:
            fail()
        except ZeroDivisionError as error:
            seen = list(error.__traceback__.tb_next.tb_frame.f_locals)  # as pytest looks
            if forgets:
                forget_failure(error)
        assert seen == ["process", "pids"]
        gc.collect()
        assert bool(unraisable) is not forgets
        assert is_alive(pids[-1]) is not forgets
    os.kill(pids[-1], signal.SIGKILL)
    os.waitpid(pids[-1], 0)


def test_a_process_ends_with_its_test():
    process = start([sys.executable, "-c", f"import time; time.sleep({PATIENCE})"])
    end_all()
    assert not is_alive(process.pid)


def test_a_fork_is_as_a_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['A'], file=sys.stderr); sys.exit(3)")
    process = fork(script, "x", 1, env={"A": "b"})
    assert process.communicate() == ("", "['x', '1'] b\n")
    assert process.returncode == 3
    script.write_text("import time; time.sleep(1000)")
    process = fork(script, env={})
    wait_until(lambda: Path(f"/proc/{process.pid}").exists())
    process.kill()
    assert process.wait() == -9
