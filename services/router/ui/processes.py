"""Processes, pairings and routes as the page shows them."""

from __future__ import annotations

from google.protobuf import duration_pb2, timestamp_pb2
from pd.v1 import inspection_pb2, transfer_status_pb2

from pd_common.inspection.views import ROLE_OF, ClusterView, ProcessView
from pd_common.types import Role
from services.router.exchange import Json
from services.router.ui.values import failure_to, time_ms


def processes_to(view: ClusterView) -> list[Json]:
    """Every process, with what the router says of it."""
    said = {worker.control_address: worker for worker in _router(view).workers}
    return [_process_to(process, said.get(process.address)) for process in view.processes]


def routes_to(view: ClusterView) -> list[Json]:
    """The ways that the router could send a request."""
    return [
        {
            "prefill": route.prefill_address or None,
            "decode": route.decode_address,
            "proven": route.proven,
            "trouble": route.trouble or None,
        }
        for route in _router(view).routes
    ]


def _router(view: ClusterView) -> inspection_pb2.GetProcessResponse:
    """What the router where the page is says of itself; nothing while it does not answer itself."""
    own = next((process.process for process in view.of_role(Role.ROUTER)), None)
    return own or inspection_pb2.GetProcessResponse()


def _process_to(view: ProcessView, worker: inspection_pb2.Worker | None) -> Json:
    return {
        "address": view.address,
        "role": view.role.value,
        "trouble": None if view.trouble is None else failure_to(view.trouble),
        "process": None if view.process is None else _life_to(view, view.process),
        "worker": None if worker is None else _worker_to(worker),
        "pool": None if view.pool is None else _pool_to(view.pool),
        "peers": [_peer_to(view, peer) for peer in view.peers],
        "quarantine": [_quarantined_to(view, room) for room in view.quarantine],
    }


def _life_to(view: ProcessView, process: inspection_pb2.GetProcessResponse) -> Json:
    started = timestamp_pb2.Timestamp()
    started.FromMicroseconds(process.instance.epoch)
    return {
        "instance_id": process.instance.instance_id,
        "started_ms": time_ms(view, started),
        "software_version": process.software_version,
        "model": process.model,
        "open_rooms": process.open_rooms,
    }


def _worker_to(worker: inspection_pb2.Worker) -> Json:
    return {
        "live": worker.live,
        "stopping": worker.stopping,
        "trouble": worker.trouble or None,
        "open_rooms": worker.open_rooms,
        "queued": worker.queued,
        "max_queued": worker.max_queued,
        "oldest_wait_ms": _duration_ms(worker.oldest_wait),
    }


def _pool_to(pool: transfer_status_pb2.GetPoolResponse) -> Json:
    """`used` is what running rooms have."""
    return {
        "pages": {
            "total": pool.pages_total,
            "used": max(pool.pages_total - pool.pages_free - pool.pages_cached - pool.pages_quarantined, 0),
            "cached": pool.pages_cached,
            "free": pool.pages_free,
            "quarantined": pool.pages_quarantined,
        },
        "slots": {
            "total": pool.slots_total,
            "used": max(pool.slots_total - pool.slots_free - pool.slots_quarantined, 0),
            "free": pool.slots_free,
            "quarantined": pool.slots_quarantined,
        },
        "live_rooms": pool.live_rooms,
        "requests_queued": pool.requests_queued,
        "requests_retracted": pool.requests_retracted,
        "pages_on_host": pool.pages_on_host,
    }


def _peer_to(view: ProcessView, peer: transfer_status_pb2.Peer) -> Json:
    return {
        "instance_id": peer.instance.instance_id,
        "role": ROLE_OF[peer.role].value,
        "address": peer.control_address,
        "carrier": peer.carrier,
        "since_ms": time_ms(view, peer.since),
        "canary_ms": time_ms(view, peer.canary_time) if peer.HasField("canary_time") else None,
        "canary_took_ms": _duration_ms(peer.canary_took),
        "live_rooms": peer.live_rooms,
    }


def _quarantined_to(view: ProcessView, room: transfer_status_pb2.QuarantinedRoom) -> Json:
    return {
        "room": str(room.bootstrap_room),
        "pages": len(room.page_ids),
        "since_ms": time_ms(view, room.since),
        "description": room.description,
    }


def _duration_ms(duration: duration_pb2.Duration) -> float:
    return duration.ToNanoseconds() / 1e6
