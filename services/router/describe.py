"""What this router says of itself, its workers and its routes to whoever inspects it."""

from __future__ import annotations

from pd.v1 import inspection_pb2

from pd_common.control import convert, inspection_servicer
from pd_common.types import Role
from services.router.dispatch import Dispatcher
from services.router.policy import LeastLoaded
from services.router.route import Route
from services.router.worker import Worker


def describe(dispatcher: Dispatcher, policy: LeastLoaded) -> inspection_pb2.GetProcessResponse:
    """As it is now."""
    workers = (*policy.prefills, *policy.decodes)
    model = next((worker.model.name for worker in workers if worker.model is not None), "")
    answer = inspection_servicer.describe(dispatcher.instance, Role.ROUTER, model)
    answer.workers.extend(_worker_to(worker) for worker in workers)
    answer.routes.extend(_route_to(route) for route in policy.routes)
    answer.open_rooms = dispatcher.open_rooms
    return answer


def _worker_to(worker: Worker) -> inspection_pb2.Worker:
    shown = inspection_pb2.Worker(
        role=convert.role_to(worker.role),
        control_address=worker.address.target,
        live=worker.is_live,
        trouble="" if worker.is_live else worker.why_not,
        open_rooms=worker.open_rooms,
        stopping=worker.is_stopping,
    )
    if worker.load is not None:
        load = worker.load
        shown.queued, shown.max_queued = load.queued, load.max_queued
        shown.oldest_wait.FromNanoseconds(round(load.oldest_wait_s * 1e9))
        shown.pages_available, shown.pages_total = load.pages_available, load.pages_total
    return shown


def _route_to(route: Route) -> inspection_pb2.Route:
    return inspection_pb2.Route(
        prefill_address="" if route.prefill is None else route.prefill.address.target,
        decode_address=route.decode.address.target,
        proven=route.is_proven,
        trouble="" if route.is_proven else route.why_not,
    )
