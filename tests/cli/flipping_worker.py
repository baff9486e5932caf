"""A child of the bench whose receiver loses one bit before it looks at what arrived."""

from __future__ import annotations

import sys

from pd_common.cli.bench import worker
from pd_common.cli.bench.receiver import Receiver
from pd_common.cli.bench.spec import Reply


class FlippingReceiver(Receiver):
    async def _digest(self, **case: str) -> Reply:
        self._memory.pool.bytes[-1] ^= 1
        return await super()._digest(**case)


if __name__ == "__main__":
    vars(worker)["Receiver"] = FlippingReceiver
    worker.main(sys.argv[1:])
