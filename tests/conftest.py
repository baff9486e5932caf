"""For every test: one thread of computation, so that two engines and their oracle can share two cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
