"""For every test: one thread of computation, so that two engines and their oracle can share two cores.

Every engine process that a test starts audits its pools after each step, and ends at once if a page is lost.
"""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
os.environ.setdefault("PD_CHECK_INTEGRITY", "1")
