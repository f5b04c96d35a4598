"""`python -m distckpt_cli`, and `torchrun -m distckpt_cli`."""

import sys

from distckpt_cli.app import main

sys.exit(main())
