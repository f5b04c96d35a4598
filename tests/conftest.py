"""What every test shares: `tests/` on the import path, and the fixtures that run the real megatron-core."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from oracle.fixtures import megatron_checkpoint, megatron_load

__all__ = ["megatron_checkpoint", "megatron_load"]
