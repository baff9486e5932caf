"""Our own binding: libucp's objects as Python classes, with ucx-py's low-level names.

Knows no asyncio and no thread. The contract of each class is in `interface`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pd_common.transport.ucx.interface import OK, Resource, UCXError, resources_in
from pd_common.transport.ucx.library import UCXLibrary, ffi, printed
from pd_common.transport.ucx.sgl import GatheredPuts, known_to

_log = logging.getLogger(__name__)

# Field bits and constants of ucp.h, named as there.
_FEATURE_RMA, _FEATURE_WAKEUP = 1 << 1, 1 << 4
_WORKER_ATTR_ADDRESS, _WORKER_ATTR_MAX_INFO_STRING = 1 << 1, 1 << 5
_EP_REMOTE_ADDRESS, _EP_ERR_HANDLING_MODE, _EP_ERR_HANDLER = 1 << 0, 1 << 1, 1 << 2
_ERR_HANDLING_MODE_PEER = 1
_OP_FLAGS, _OP_MEMH, _OP_NO_IMM_CMPL = 1 << 4, 1 << 8, 1 << 16
_CLOSE_FORCE = 1 << 0
_API_VERSION: Final = (1, 13)

IN_PROGRESS: Final = 1
_BUSY: Final = -15
_FIRST_ERROR_POINTER: Final = 2**64 - 100

_PROGRESS_BURST = 32
"""Calls of progress in a row: a stream over tcp needs thousands a second, and only the call itself lets others run."""


class UCXContext:
    """One UCX instance; everything else is made from it and must be gone before `close`."""

    def __init__(self, library: UCXLibrary, options: Mapping[str, str]) -> None:
        self.gathers = known_to(library.version)
        self.status_text = library.status_text
        self._lib = library.functions
        config = ffi.new("ucp_config_t **")
        self._check(self._lib.ucp_config_read(ffi.NULL, ffi.NULL, config), "reading UCX's configuration")
        try:
            self._modify(config[0], options)
            params = ffi.new("ucp_params_t *", {"field_mask": 1, "features": _FEATURE_RMA | _FEATURE_WAKEUP})
            context = ffi.new("ucp_context_h *")
            self._check(self._lib.ucp_init_version(*_API_VERSION, params, config[0], context), "starting UCX")
        finally:
            self._lib.ucp_config_release(config[0])
        self._handle = context[0]

    def _modify(self, config: Any, options: Mapping[str, str]) -> None:
        for name, value in options.items():
            status = self._lib.ucp_config_modify(config, name.encode(), value.encode())
            if status != OK:
                _log.warning("this UCX does not take %s=%s: %s", name, value, self.status_text(status))

    def error(self, status: int, doing: str) -> UCXError:
        return UCXError(f"{doing}: {self.status_text(status)}", status)

    def _check(self, status: int, doing: str) -> None:
        if status != OK:
            raise self.error(status, doing)

    @property
    def resources(self) -> tuple[Resource, ...]:
        return resources_in(printed(self._lib.ucp_context_print_info, self._handle))

    def map(self, base: int, length: int) -> UCXMemoryHandle:
        """Registers `length` bytes from address `base`."""
        params = ffi.new("ucp_mem_map_params_t *", {"field_mask": 3, "address": base, "length": length})
        memory = ffi.new("ucp_mem_h *")
        self._check(self._lib.ucp_mem_map(self._handle, params, memory), f"registering {length} bytes")
        return UCXMemoryHandle(self._lib, self._handle, memory[0])

    def create_worker(self) -> UCXWorker:
        params = ffi.new("ucp_worker_params_t *")
        worker = ffi.new("ucp_worker_h *")
        self._check(self._lib.ucp_worker_create(self._handle, params, worker), "creating a worker")
        return UCXWorker(self, self._lib, worker[0])

    def close(self) -> None:
        self._lib.ucp_cleanup(self._handle)


class UCXMemoryHandle:
    """One registered range of this process's memory."""

    def __init__(self, lib: Any, context: Any, handle: Any) -> None:
        self._lib = lib
        self._context = context
        self._handle = handle
        self.put_params = ffi.new("ucp_request_param_t *", {"op_attr_mask": _OP_MEMH, "memh": handle})
        """What a PUT out of this range passes to `ucp_put_nbx`."""
        traced = {"op_attr_mask": _OP_MEMH | _OP_NO_IMM_CMPL, "memh": handle}
        self.traced_put_params = ffi.new("ucp_request_param_t *", traced)
        """The same for a PUT that always makes a request, so that it can be asked how it travels."""

    def pack_rkey(self) -> bytes:
        return packed_rkey(self._lib, self._context, self._handle)

    def unmap(self) -> None:
        self._lib.ucp_mem_unmap(self._context, self._handle)


def packed_rkey(lib: Any, context: Any, memory: Any) -> bytes:
    """The key of a `ucp_mem_h`.

    Raises:
        UCXError: there is none.
    """
    buffer, size = ffi.new("void **"), ffi.new("size_t *")
    status = lib.ucp_rkey_pack(context, memory, buffer, size)
    if status != OK:
        raise UCXError("packing a remote key", status)
    packed = bytes(ffi.buffer(buffer[0], size[0]))
    lib.ucp_rkey_buffer_release(buffer[0])
    return packed


def take(lib: Any, request: int) -> int | None:
    """The status of a request, which is freed with it; None while it is in progress."""
    if not request:
        return OK
    status = int(lib.ucp_request_check_status(request))
    if status == IN_PROGRESS:
        return None
    lib.ucp_request_free(request)
    return status


def close_by_force(lib: Any, endpoint: Any) -> int:
    """What `ucp_ep_close_nbx` returns: outstanding requests finish as cancelled."""
    params = ffi.new("ucp_request_param_t *", {"op_attr_mask": _OP_FLAGS, "flags": _CLOSE_FORCE})
    return int(lib.ucp_ep_close_nbx(endpoint, params))


class UCXWorker:
    """One communication instance: what is destroyed together with it can neither send nor receive any more."""

    def __init__(self, context: UCXContext, lib: Any, handle: Any) -> None:
        self.context = context
        self._lib = lib
        self._handle = handle
        descriptor = ffi.new("int *")
        status = lib.ucp_worker_get_efd(handle, descriptor)
        if status != OK:
            lib.ucp_worker_destroy(handle)
            raise context.error(status, "getting a worker's event descriptor")
        self.event_fd: int = descriptor[0]

    def address(self) -> bytes:
        """What a peer's `create_endpoint` needs."""
        attributes = ffi.new("ucp_worker_attr_t *", {"field_mask": _WORKER_ATTR_ADDRESS})
        status = self._lib.ucp_worker_query(self._handle, attributes)
        if status != OK:
            raise self.context.error(status, "asking for a worker's address")
        packed = bytes(ffi.buffer(attributes.address, attributes.address_length))
        self._lib.ucp_worker_release_address(self._handle, attributes.address)
        return packed

    def describe(self, request: int) -> str:
        """UCX's own words for how it carries a request that is not freed yet."""
        attributes = ffi.new("ucp_worker_attr_t *", {"field_mask": _WORKER_ATTR_MAX_INFO_STRING})
        status = self._lib.ucp_worker_query(self._handle, attributes)
        size = attributes.max_debug_string if status == OK else 0
        text = ffi.new("char[]", size + 1)
        query = ffi.new("ucp_request_attr_t *", {"field_mask": 3, "debug_string": text, "debug_string_size": size + 1})
        if status != OK or self._lib.ucp_request_query(request, query) != OK:
            return ""
        return str(ffi.string(text).decode(errors="replace"))

    def progress(self) -> bool:
        """Moves everything of this worker on, without waiting; False when there was nothing to do."""
        progress, worker = self._lib.ucp_worker_progress, self._handle
        for call in range(_PROGRESS_BURST):
            if not progress(worker):
                return call > 0
        return True

    def arm(self) -> bool:
        """Whether `event_fd` will tell of the next event; False when there is one already."""
        status = self._lib.ucp_worker_arm(self._handle)
        if status not in {OK, _BUSY}:
            _log.warning("arming a worker: %s", self.context.status_text(status))
        return bool(status != _BUSY)

    def create_endpoint(self, address: bytes) -> UCXEndpoint:
        return UCXEndpoint(self, self._lib, self._handle, address)

    def destroy(self) -> None:
        self._lib.ucp_worker_destroy(self._handle)


class UCXRkey:
    """A peer's range as one endpoint may write it."""

    def __init__(self, lib: Any, handle: Any) -> None:
        self._lib = lib
        self.handle = handle

    def destroy(self) -> None:
        self._lib.ucp_rkey_destroy(self.handle)


class UCXEndpoint:
    """The way to one peer's worker, in peer error handling mode: once `failure` is set nothing may be posted."""

    def __init__(self, worker: UCXWorker, lib: Any, worker_handle: Any, address: bytes) -> None:
        self.failure: UCXError | None = None
        self._worker = worker
        self._lib = lib
        # UCX parses an address without knowing its length: zeros behind it end every loop over it.
        self._address = ffi.new("char[]", address + bytes(256))
        self._on_error = ffi.callback("ucp_err_handler_cb_t", self._failed)
        params = ffi.new(
            "ucp_ep_params_t *",
            {
                "field_mask": _EP_REMOTE_ADDRESS | _EP_ERR_HANDLING_MODE | _EP_ERR_HANDLER,
                "address": ffi.cast("ucp_address_t *", self._address),
                "err_mode": _ERR_HANDLING_MODE_PEER,
                "err_handler_cb": self._on_error,
            },
        )
        endpoint = ffi.new("ucp_ep_h *")
        status = lib.ucp_ep_create(worker_handle, params, endpoint)
        if status != OK:
            raise worker.context.error(status, "creating an endpoint")
        self._handle = endpoint[0]

    def _failed(self, _arg: Any, _endpoint: Any, status: int) -> None:
        self.failure = self.error(status, "the endpoint failed")

    def unpack_rkey(self, packed: bytes) -> UCXRkey:
        rkey = ffi.new("ucp_rkey_h *")
        status = self._lib.ucp_ep_rkey_unpack(self._handle, ffi.from_buffer(packed + bytes(64)), rkey)
        if status != OK:
            raise self.error(status, "unpacking a remote key")
        return UCXRkey(self._lib, rkey[0])

    def put_nbx(self, puts: Iterable[tuple[int, int, int, Any, Any]], requests: deque[int]) -> None:
        """Posts puts of (local address, length, remote address, rkey handle, put_params); keeps what is not done."""
        put, endpoint, append = self._lib.ucp_put_nbx, self._handle, requests.append
        for local, length, remote, rkey, params in puts:
            request = put(endpoint, local, length, remote, rkey, params)
            if request:
                if request >= _FIRST_ERROR_POINTER:
                    raise self.error(request - 2**64, "posting a put")
                append(request)

    def put_gathered(self, puts: GatheredPuts, requests: deque[int]) -> None:
        request = self._started(puts.post(self._lib, self._handle), "posting gathered puts")
        if request:
            requests.append(request)

    def reap(self, requests: deque[int]) -> UCXError | None:
        """Frees finished requests from the front, up to the first that is not; the first failure among them."""
        check, free, failure = self._lib.ucp_request_check_status, self._lib.ucp_request_free, None
        while requests and (status := check(requests[0])) != IN_PROGRESS:
            free(requests.popleft())
            if status != OK and failure is None:
                failure = self.error(status, "a put failed")
        return failure

    def take(self, request: int) -> int | None:
        return take(self._lib, request)

    def error(self, status: int, doing: str) -> UCXError:
        return self._worker.context.error(status, doing)

    def flush_nbx(self) -> int:
        """Starts a flush: a request, or 0 when everything is visible remotely already."""
        return self._started(self._lib.ucp_ep_flush_nbx(self._handle, ffi.new("ucp_request_param_t *")), "flushing")

    def close_nbx(self) -> int:
        return self._started(close_by_force(self._lib, self._handle), "closing an endpoint")

    def _started(self, request: int, doing: str) -> int:
        if request >= _FIRST_ERROR_POINTER:
            raise self.error(request - 2**64, doing)
        return request
