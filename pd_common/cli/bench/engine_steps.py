"""A thread that computes as an engine does, and how long its steps take."""

from __future__ import annotations

import asyncio
import threading
import time

import torch

STEP_S = 0.005
_SIZE = 256
_CALIBRATION = 200


class EngineSteps:
    """Steps of `products` matrix products each, on one thread of computation."""

    def __init__(self) -> None:
        self._matrix = torch.rand(_SIZE, _SIZE)
        self._stop = threading.Event()
        self._running: asyncio.Task[float] | None = None

    async def calibrate(self) -> int:
        """How many products a step of 5 ms has on this machine, by processor time: others may be at work too."""
        return max(1, round(STEP_S / await asyncio.to_thread(self._product_s)))

    def _product_s(self) -> float:
        torch.set_num_threads(1)
        self._products(_CALIBRATION)  # warms up
        began = time.thread_time()
        self._products(_CALIBRATION)
        return (time.thread_time() - began) / _CALIBRATION

    async def begin(self, products: int) -> None:
        """Starts to compute."""
        self._stop.clear()
        self._running = asyncio.create_task(asyncio.to_thread(self._compute, products))

    async def end(self) -> float:
        """Stops; seconds that a step took on average since `begin`."""
        self._stop.set()
        if self._running is None:
            return 0.0
        return await self._running

    def _products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix)

    def _compute(self, products: int) -> float:
        torch.set_num_threads(1)  # counts for the thread that calls it
        steps, began = 0, time.perf_counter()
        while not self._stop.is_set():
            self._products(products)
            steps += 1
        return (time.perf_counter() - began) / max(1, steps)
