"""The binding on ucx-py's low-level module, for whoever has that retired package; it calls the same libucp.

What ucx-py lacks: it cannot say what carries a request, nor gather puts; and it closes an endpoint only when its peer
has answered, so one whose peer is silent is closed by our own call.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pd_common.errors import TransportUnavailable
from pd_common.transport.ucx.binding import close_by_force, packed_rkey, take
from pd_common.transport.ucx.interface import GONE, OK, Resource, UCXError, resources_in
from pd_common.transport.ucx.library import UCXLibrary, ffi
from pd_common.transport.ucx.sgl import GatheredPuts

_OTHER_ERROR: Final = -1
_CANCELED: Final = -16
_UNSUPPORTED: Final = -22
_PADDING: Final = bytes(256)
"""UCX parses addresses and keys without knowing their length: zeros behind them end every loop."""


def _ucx_api() -> Any:
    try:
        return importlib.import_module("ucp._libs.ucx_api")
    except ImportError as error:
        raise TransportUnavailable(
            "ucx-py is not installed. It is retired: take 0.45 from conda (channel rapidsai), or build it from source "
            "against the libucx in use; or leave --ucx-binding at own",
            ucx_binding="ucx-py",
        ) from error


class _Errors:
    """ucx-py reports failures as text: finds the status behind it."""

    def __init__(self, library: UCXLibrary) -> None:
        exceptions = importlib.import_module("ucp._libs.exceptions")
        self.raised: Any = exceptions.UCXBaseException
        self._canceled: Any = exceptions.UCXCanceled
        self.text = library.status_text
        self._statuses = {library.status_text(status): status for status in GONE}

    def status(self, error: Exception) -> int:
        if isinstance(error, self._canceled):
            return _CANCELED
        return next((status for text, status in self._statuses.items() if str(error).endswith(text)), _OTHER_ERROR)

    def translated(self, error: Exception, doing: str) -> UCXError:
        return UCXError(f"{doing}: {error}", self.status(error))


class UcxPyContext:
    """ucx-py's context."""

    gathers = False

    def __init__(self, library: UCXLibrary, options: Mapping[str, str]) -> None:
        self.api = _ucx_api()
        self.library = library
        self.errors = _Errors(library)
        self._context = self._open(options)

    def _open(self, options: Mapping[str, str]) -> Any:
        features = (self.api.Feature.RMA, self.api.Feature.WAKEUP)
        try:
            return self.api.UCXContext(dict(options), feature_flags=features)
        except self.errors.raised as error:
            raise self.errors.translated(error, "starting UCX") from error

    @property
    def resources(self) -> tuple[Resource, ...]:
        return resources_in(self._context.info())

    def map(self, base: int, length: int) -> UcxPyMemoryHandle:
        try:
            handle = self.api.UCXMemoryHandle.map(self._context, _memory(base, length))
        except self.errors.raised as error:
            raise self.errors.translated(error, f"registering {length} bytes") from error
        return UcxPyMemoryHandle(self.library, self._context, handle)

    def create_worker(self) -> UcxPyWorker:
        try:
            return UcxPyWorker(self, self.api.UCXWorker(self._context))
        except self.errors.raised as error:
            raise self.errors.translated(error, "creating a worker") from error

    def close(self) -> None:
        self._context.close()


class UcxPyMemoryHandle:
    """ucx-py finds a registration by the address."""

    put_params = None
    traced_put_params = None

    def __init__(self, library: UCXLibrary, context: Any, handle: Any) -> None:
        self._library = library
        self._context = context
        self._handle = handle

    def pack_rkey(self) -> bytes:
        """By our own call: ucx-py copies the key out of a buffer that it has freed already."""
        context = ffi.cast("ucp_context_h", self._context.handle)
        return packed_rkey(self._library.functions, context, ffi.cast("ucp_mem_h", self._handle.mem_handle))

    def unmap(self) -> None:
        self._handle.close()


class UcxPyWorker:
    """ucx-py's worker; its event descriptor is an epoll that ucx-py makes and leaves open."""

    def __init__(self, context: UcxPyContext, worker: Any) -> None:
        self.context = context
        self._worker = worker
        self.event_fd: int = worker.init_blocking_progress_mode()

    def address(self) -> bytes:
        return bytes(self._worker.get_address())

    def describe(self, _request: Any) -> str:
        return ""

    def progress(self) -> bool:
        """Runs until there is nothing to do; whether there was something it does not tell, but the descriptor does."""
        self._worker.progress()
        return False

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def create_endpoint(self, address: bytes) -> UcxPyEndpoint:
        api = self.context.api
        parsed = api.UCXAddress.from_buffer(address + _PADDING)
        try:
            made = api.UCXEndpoint.create_from_worker_address(self._worker, parsed, endpoint_error_handling=True)
        except self.context.errors.raised as error:
            raise self.context.errors.translated(error, "creating an endpoint") from error
        return UcxPyEndpoint(self, made)

    def destroy(self) -> None:
        self._worker.close()
        os.close(self.event_fd)


class _Pending:
    """A request: `status` is set by its callback."""

    def __init__(self) -> None:
        self.status: int | None = None


class UcxPyEndpoint:
    """ucx-py's endpoint, with error handling."""

    def __init__(self, worker: UcxPyWorker, endpoint: Any) -> None:
        self._worker = worker
        self._errors = worker.context.errors
        self._lib = worker.context.library.functions
        self._endpoint = endpoint
        self._closed = False
        self._failure: UCXError | None = None
        self._rkeys: list[UcxPyRkey] = []
        self._outstanding: set[_Pending] = set()

    @property
    def failure(self) -> UCXError | None:
        if self._failure is None and not self._closed and not self._endpoint.is_alive():
            try:
                self._endpoint.raise_on_error()
            except self._errors.raised as error:
                self._failure = self._errors.translated(error, "the endpoint failed")
        return self._failure

    def unpack_rkey(self, packed: bytes) -> UcxPyRkey:
        api = self._worker.context.api
        try:
            made = self._endpoint.unpack_rkey(api.PackedRemoteKey.from_buffer(packed + _PADDING))
        except self._errors.raised as error:
            raise self._errors.translated(error, "unpacking a remote key") from error
        self._rkeys.append(UcxPyRkey(api, self._errors, made))
        return self._rkeys[-1]

    def put_nbx(self, puts: Iterable[tuple[int, int, int, Any, Any]], requests: deque[Any]) -> None:
        try:
            for local, length, remote, rkey, _ in puts:
                if length:
                    pending = self._started(rkey.put_nb, _memory(local, length), offset=remote)
                    requests.extend(() if pending is None else (pending,))
        except self._errors.raised as error:
            raise self._errors.translated(error, "posting a put") from error

    def put_gathered(self, _puts: GatheredPuts, _requests: deque[Any]) -> None:
        raise UCXError("ucx-py cannot gather puts", _UNSUPPORTED)

    def reap(self, requests: deque[Any]) -> UCXError | None:
        failure = None
        while requests and (status := requests[0].status) is not None:
            requests.popleft()
            if status != OK and failure is None:
                failure = self.error(status, "a put failed")
        return failure

    def take(self, request: _Pending | int | None) -> int | None:
        if isinstance(request, _Pending):
            return request.status
        return take(self._lib, request or 0)

    def flush_nbx(self) -> _Pending | None:
        try:
            return self._started(self._endpoint.flush)
        except self._errors.raised as error:
            raise self._errors.translated(error, "flushing") from error

    def close_nbx(self) -> int:
        """By ucx-py's own means when it has failed or nothing is outstanding; they wait for the peer otherwise."""
        by_force = bool(self._outstanding) and self.failure is None
        self._closed = True
        if by_force:
            handle = ffi.cast("ucp_ep_h", self._endpoint.handle)
            for each in (self._endpoint, *(rkey.made for rkey in self._rkeys)):
                _keep_from_closing(each)
            return close_by_force(self._lib, handle)
        for rkey in self._rkeys:
            rkey.destroy()
        with contextlib.suppress(self._errors.raised):  # it had failed, and is closed all the same
            self._endpoint.close()
        return 0

    def error(self, status: int, doing: str) -> UCXError:
        return UCXError(f"{doing}: {self._errors.text(status)}", status)

    def _started(self, call: Any, *arguments: Any, **options: Any) -> _Pending | None:
        """None when it is done already."""
        pending = _Pending()
        self._outstanding.add(pending)
        try:
            request = call(*arguments, self._finished, (pending,), {}, **options)
        except self._errors.raised:
            self._outstanding.discard(pending)
            raise
        if request is not None:
            return pending
        self._outstanding.discard(pending)
        return None

    def _finished(self, _request: Any, error: Exception | None, pending: _Pending) -> None:
        pending.status = OK if error is None else self._errors.status(error)
        self._outstanding.discard(pending)


class UcxPyRkey:
    """All of a peer's address space under one key: `handle` puts to an offset that is the remote address itself."""

    def __init__(self, api: Any, errors: _Errors, rkey: Any) -> None:
        self.handle = api.RemoteMemory(rkey, 0, _ADDRESS_SPACE)
        self.made = rkey
        self._raised = errors.raised

    def destroy(self) -> None:
        with contextlib.suppress(self._raised):  # ucx-py flushes first, which fails when the endpoint has failed
            self.made.close()


def _keep_from_closing(made: Any) -> None:
    """Takes away ucx-py's finalizer of an object: it would use what is closed, at the latest when the process ends."""
    for finalizer in tuple(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and alive[0] is made:
            finalizer.detach()


_ADDRESS_SPACE: Final = 1 << 63


def _memory(base: int, length: int) -> Any:
    """Memory of any kind as an object whose address and size ucx-py asks for; it is not touched."""
    return (ctypes.c_ubyte * length).from_address(base)
