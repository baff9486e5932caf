"""Which prefill and which decode a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_common.errors import InvalidRequest, NoWorkers
from pd_common.types import BootstrapAddress, Role
from services.router.worker import Worker


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode for one request."""

    prefill: Worker
    decode: Worker


class LeastRooms:
    """Of the usable workers of each role the one with the fewest rooms; the first in order among equals."""

    def __init__(self, prefills: Sequence[Worker], decodes: Sequence[Worker]) -> None:
        self.prefills = tuple(prefills)
        self.decodes = tuple(decodes)

    def pick(self, bootstrap: BootstrapAddress | None) -> Pair:
        """A pair; `bootstrap` asks for one prefill by the address that the router knows it by.

        Raises:
            NoWorkers: no usable worker of a role.
            InvalidRequest: the router has no such prefill.

        """
        prefills = self.prefills
        if bootstrap is not None:
            prefills = tuple(worker for worker in prefills if worker.address == bootstrap)
            if not prefills:
                raise InvalidRequest(f"this router has no prefill {bootstrap.target}", field="bootstrap_host")
        return Pair(_least(prefills, Role.PREFILL), _least(self.decodes, Role.DECODE))


def _least(workers: Sequence[Worker], role: Role) -> Worker:
    usable = [worker for worker in workers if worker.is_usable]
    if not usable:
        raise NoWorkers(f"no usable {role.value}: {why_none(workers)}", role=role.value)
    return min(usable, key=lambda worker: worker.open_rooms)


def why_none(workers: Sequence[Worker]) -> str:
    """For a person: what is the matter with each."""
    return "; ".join(f"{worker.address.target}: {worker.why_not}" for worker in workers if not worker.is_usable)
