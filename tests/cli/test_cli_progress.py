"""Progress in a log and on a terminal, and what signals do."""

from __future__ import annotations

import re
import signal
import sys
import threading

import pytest

from converters.events import FileDone, Moved, Note, Phase, PlanReady, Resumed, StopFlag
from distckpt_cli.console import Console
from distckpt_cli.progress import Progress, choose_mode, format_time
from distckpt_cli.signals import stop_on_signals
from harness.cli_support import ROOT, environment, terminal
from harness.processes import finish, start, wait_until

GIB = 1 << 30


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def logged(capsys, *steps, interval: float = 1e9) -> list[str]:
    """The lines that a log shows; a number among the steps lets that many seconds pass, None asks for a line."""
    clock = Clock()
    with Progress(Console(), "log", interval=interval, clock=clock, stamp=lambda: "14:02:00") as listener:
        for step in steps:
            if step is None:
                listener._log_line()
            elif isinstance(step, (int, float)):
                clock.now += step
            else:
                listener(step)
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


PLAN = PlanReady("export", 64, 110 * GIB, 100 * GIB, 1 << 26)


def test_a_log_line(capsys):
    lines = logged(capsys, PLAN, 10, Moved(18 * GIB), FileDone("a", GIB), None)
    assert lines == [
        "14:02:00 export   18%  18.0 GiB of 100.0 GiB  1.8 GiB/s  eta 46s  1/64 files",
    ]


def test_the_rate_is_that_of_the_last_half_minute(capsys):
    slow = [step for _ in range(60) for step in (1, Moved(GIB // 10))]
    fast = [step for _ in range(40) for step in (1, Moved(GIB))]
    assert "  1.0 GiB/s  " in logged(capsys, PLAN, *slow, *fast, None)[-1]


def test_resumed_bytes_are_done_but_not_fast(capsys):
    lines = logged(capsys, PLAN, Resumed(50 * GIB, 32), 10, Moved(10 * GIB), None)
    assert lines[0] == "resuming 32 of 64 files already done"
    assert lines[1] == "14:02:00 export   60%  60.0 GiB of 100.0 GiB  1.0 GiB/s  eta 40s  32/64 files"


def test_phases_and_notes(capsys):
    note, shown = Note("tied \x1b[31membeddings"), "note: tied \\x1b[31membeddings"
    phases = ["14:02:00 distckpt  planning", "14:02:00 export  publishing"]
    assert logged(capsys, 30, Phase("planning"), PLAN, note, Phase("publishing"), interval=30) == [
        phases[0],
        shown,
        phases[1],
    ]
    assert logged(capsys, 29, Phase("planning"), PLAN, note, Phase("publishing"), interval=30) == [shown]  # a short run


def test_nothing_to_write(capsys):
    assert "  0%" in logged(capsys, PlanReady("export", 0, 0, 0, 0), 1, None)[-1]


def test_lines_come_by_themselves(capsys):
    lines = []
    with Progress(Console(), "log", interval=0.01) as listener:
        listener(PLAN)
        wait_until(lambda: lines.extend(capsys.readouterr().err.splitlines()) or len(lines) >= 3)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_many_threads(capsys):
    with Progress(Console(), "log", interval=0.001) as listener:
        listener(PlanReady("export", 800, 8 << 20, 8 << 20, 0))

        def work():
            for _ in range(100):
                listener(Moved(10_486))
                listener(FileDone("x", 1))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert listener.bytes_done == 800 * 10_486
    assert all(re.match(r"\d\d:\d\d:\d\d export ", line) for line in capsys.readouterr().err.splitlines())


def test_off_is_silent(capsys):
    with Progress(Console(quiet=True), "off") as listener:
        for event in (PLAN, Moved(1), FileDone("a", 1), Resumed(1, 1), Note("x"), Phase("y")):
            listener(event)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (51.2, "51s"), (59.9, "1m 00s"), (245, "4m 05s"), (7800, "2h 10m")]
)
def test_format_time(seconds, text):
    assert format_time(seconds) == text


def test_choose_mode(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert choose_mode("auto") == "log"  # pytest's stderr is no terminal
    assert choose_mode("bar") == "bar"
    assert choose_mode("bar", quiet=True) == "off"
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert choose_mode("log") == "off"


BAR = """
import threading
from converters.events import *
from distckpt_cli.console import Console
from distckpt_cli.progress import Progress, choose_mode
mode = choose_mode("auto")
with Progress(Console(), mode, interval=0.05) as listener:
    shown, show = threading.Event(), listener._log_line
    listener._log_line = lambda: (show(), shown.set())
    listener(PlanReady("export", 4, 100 << 20, 100 << 20, 0))
    listener(Note("[bold]kept[/bold] \\x1b[31m"))
    for _ in range(4):
        listener(Moved(20 << 20)); listener(FileDone("f", 1)); shown.clear()
        mode == "bar" or shown.wait(200)
print("wrote it")
"""


@pytest.mark.parametrize("columns", [40, 120])
def test_a_bar_on_a_terminal(columns):
    code, text = terminal([sys.executable, "-c", BAR], columns, cwd=ROOT)
    assert code == 0
    assert "\x1b[?25l" in text  # the cursor is hidden,
    assert text.rstrip().endswith("wrote it")
    assert "\x1b[?25h" in text  # and comes back
    assert "[bold]kept[/bold] \\x1b[31m" in text.replace("\n", "")
    assert re.search(r"\d\d%", text)
    assert ("/4 files" in text) is (columns == 120)
    assert "\x1b[2K" in text  # what was drawn is removed again


def test_a_dumb_terminal_gets_lines():
    code, text = terminal([sys.executable, "-c", BAR], 80, cwd=ROOT, TERM="dumb")
    assert code == 0
    assert "\x1b" not in text
    assert re.search(r"^\d\d:\d\d:\d\d export +[1-9]\d%", text, re.MULTILINE)


def test_stop_flag():
    flag = StopFlag()
    assert not flag.is_set()
    assert flag.wait(0.001) is False
    flag.set(15)
    assert flag.is_set()
    assert flag.signum == 15
    assert flag.wait(10) is True


LOOP = """
import sys
from converters.errors import Interrupted
from distckpt_cli import app
from distckpt_cli.signals import stop_on_signals
def run(path, **_):
    with stop_on_signals() as flag:
        print("ready", flush=True)
        while not flag.wait(0.01) or STUBBORN: pass
        raise Interrupted(flag.signum, "3 of 9 files done; run the same command to continue")
import converters.formats
converters.formats.open_checkpoint = run
sys.exit(app.main(["inspect", "x"]))
"""


def _run_and_signal(code: str, *signals: int) -> tuple[int, str, str]:
    process = start([sys.executable, "-c", code], env=environment(), cwd=ROOT)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    said = ""
    for count, number in enumerate(signals, 1):
        process.send_signal(number)
        if count < len(signals):  # two at once are one to the system
            said += process.stderr.readline()
    ((out, err),) = finish([process])
    return process.returncode, out, said + err


def _signalled(stubborn: bool, *signals: int) -> tuple[int, str]:
    code, _, err = _run_and_signal(LOOP.replace("STUBBORN", str(stubborn)), *signals)
    return code, err


@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, "Ctrl-C again"), (signal.SIGTERM, "once more")])
def test_the_first_signal_stops_gently(number, again):
    code, err = _signalled(False, number)
    assert code == 128 + number
    assert f"stopping after the current tiles ({again} to abort)" in err
    assert err.endswith("stopped 3 of 9 files done; run the same command to continue\n")


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_the_second_signal_ends_it(numbers):
    code, err = _signalled(True, *numbers)
    assert code == 130
    assert "stopped 3 of 9" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_nothing_polls_ends_it_with_a_word(number):
    code = LOOP.replace("with stop_on_signals() as flag:", "if True:").replace(
        "not flag.wait(0.01) or STUBBORN", "True"
    )
    ended, out, err = _run_and_signal(code, number)
    assert (ended, out, err.strip()) == (128 + number, "", f"stopped by {number.name}")


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_on_signals():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_no_handlers_outside_the_main_thread():
    seen = []

    def work():
        with stop_on_signals() as flag:
            seen.append(flag.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
