"""`distckpt`, `python -m distckpt_cli`, and `torchrun -m distckpt_cli`."""

import gc
import os
import signal
import sys


def main() -> int:
    """Runs the command line of this process, which a signal ends without a traceback even before all is imported."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # taken when there is who can say so
    gc.set_threshold(100_000, 50, 100)  # a catalog's objects stay to the end: looking through them again costs a tenth
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start a thread for each core, which then spin
    from distckpt_cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
