"""For every test: one thread of computation, so that two engines and their oracle can share two cores.

Every engine process that a test starts audits its pools after each step, and ends at once if a page is lost.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ.setdefault("PD_CHECK_INTEGRITY", "1")

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
