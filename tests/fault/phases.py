"""A process that is killed or stopped, or only waits, when it comes to a certain phase of a command.

planning    before the source is opened
proof       while a writing command looks at the source's data for what it has to be sure of
looking     at the first bytes that verify or diff have looked at
answering   before rank 0 says what verify or diff found; others: before they wait for it
working     at the first bytes that are written
checking    when the rank's share is done, before the checksums of output records are put together
publishing  rank 0: before the result appears; others: before they wait for that
"""

import os
import signal
import time
from pathlib import Path

import converters.commands as commands
import converters.execute.publish as publish
import converters.execute.run as engine
import converters.execute.work_sharing as sharing
import converters.execute.worker as worker
import converters.formats as formats
import converters.optimizer.proof as proof

PLACES = {
    "planning": ((formats, "open_checkpoint"), (commands, "open_checkpoint")),
    "proof": ((proof.MasterWorker, "do"),),
    "looking": ((sharing.WorkSharing, "report"),),
    "answering": ((sharing.WorkSharing, "finish"),),
    "working": ((worker.TileWriter, "do"),),
    "checking": ((engine, "seal"),),
    "publishing": ((publish.Staging, "publish"), (sharing.WorkSharing, "finish")),
}


def disturb(phase, action):
    """Arms this process.

    Args:
        phase: When.
        action: `KILL`, `STOP`, seconds to wait each time, or `[how, path]`: what happens to a file once.
    """
    for owner, name in PLACES[phase]:
        setattr(owner, name, _before(getattr(owner, name), action))


def _before(original, action):
    done = []

    def disturbed(*args, **kwargs):
        if isinstance(action, float):
            time.sleep(action)
        elif not done:
            done.append(True)
            ACTIONS[action]() if isinstance(action, str) else CHANGES[action[0]](Path(action[1]))
        return original(*args, **kwargs)

    return disturbed


def _replace(path):
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


ACTIONS = {"KILL": lambda: os.kill(os.getpid(), signal.SIGKILL), "STOP": lambda: os.kill(os.getpid(), signal.SIGSTOP)}
CHANGES = {
    "touched": os.utime,
    "replaced": _replace,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "removed": os.unlink,
}
