"""Requests to a child about the engine thread beside its transfers."""

from __future__ import annotations

from typing import Any

from pd_common.cli.bench.spec import Handler, Reply


class EngineRequests:
    """Requests about the engine thread; PyTorch is loaded by the first of them."""

    def __init__(self) -> None:
        self._steps: Any = None
        self.handlers: dict[str, Handler] = {
            "calibrate": self._calibrate,
            "engine_begin": self._begin,
            "engine_end": self._end,
        }

    async def _calibrate(self) -> Reply:
        return {"products": await self._loaded().calibrate()}

    async def _begin(self, products: int) -> Reply:
        await self._loaded().begin(products)
        return {}

    async def _end(self) -> Reply:
        return {"step_s": await self._loaded().end()}

    def _loaded(self) -> Any:
        if self._steps is None:
            from pd_common.cli.bench.engine_steps import EngineSteps  # noqa: PLC0415 - a second, and 200 MB

            self._steps = EngineSteps()
        return self._steps
