"""`distckpt`, `python -m distckpt_cli`, and `torchrun -m distckpt_cli`."""

import signal
import sys


def main() -> int:
    """Runs the command line of this process, which a signal ends without a traceback even before all is imported."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # taken when there is who can say so
    from distckpt_cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
