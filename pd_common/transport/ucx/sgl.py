"""Many puts in one call: UCX's scatter-gather PUT (from 1.22 on), used where a probe has found that a peer can have it.

Where UCX has no protocol for it the call fails and takes its endpoint with it, so a connection of its own tries it out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pd_common.transport.ucx.library import ffi

_SINCE: Final = (1, 22)
_WITHOUT: Final = frozenset({"self", "cma", "tcp", "sysv", "posix", "unknown"})
"""Transports of UCX 1.22 that are known to have no protocol for it."""
# Constants of ucp.h, named as there.
_LOCAL_BUFFERS_LENGTHS_MEMHS, _REMOTE_ADDRS_LENGTHS_RKEYS = 0b111, 0b111
_DATATYPE_SGL = 4
_OP_DATATYPE, _OP_REMOTE_DATATYPE, _OP_REMOTE, _OP_REMOTE_COUNT = 1 << 3, 1 << 9, 1 << 10, 1 << 11
_REMOTE_ADDR_INVALID = 2**64 - 1


def known_to(version: str) -> bool:
    """Whether a UCX of this version, such as `1.22.0`, has the call."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _SINCE


def worth_a_probe(carrier: str) -> bool:
    """Whether a peer that is reached by this carrier could have a protocol for it."""
    return not any(lane.partition("/")[0] in _WITHOUT for lane in carrier.split("+"))


@dataclass(frozen=True, slots=True, eq=False)
class GatheredPuts:
    """Puts out of one registered range, as UCX reads them: the arrays must live until the request is done."""

    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    rkeys: NDArray[np.uint64]
    memories: NDArray[np.uint64]

    @staticmethod
    def of(
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        lengths: NDArray[np.int64],
        targets: NDArray[np.int64],
        rkeys: Sequence[Any],
        put_params: Any,
    ) -> GatheredPuts:
        """Puts out of the range of `put_params`; `targets` are indices into the handles `rkeys`."""
        keys = np.array([_address(rkey) for rkey in rkeys], dtype=np.uint64)
        return GatheredPuts(
            local=local.astype(np.uint64),
            remote=remote.astype(np.uint64),
            lengths=lengths.astype(np.uint64),
            rkeys=keys[targets],
            memories=np.full(len(local), _address(put_params.memh), dtype=np.uint64),
        )

    def post(self, lib: Any, endpoint: Any) -> int:
        """What `ucp_put_nbx` returns for all of them."""
        lengths, count = self.lengths.ctypes.data, len(self.lengths)
        local = ffi.new(
            "ucp_dt_local_sgl_t *",
            {
                "field_mask": _LOCAL_BUFFERS_LENGTHS_MEMHS,
                "buffers": self.local.ctypes.data,
                "lengths": lengths,
                "memhs": self.memories.ctypes.data,
            },
        )
        remote = ffi.new(
            "ucp_dt_remote_sgl_t *",
            {
                "field_mask": _REMOTE_ADDRS_LENGTHS_RKEYS,
                "remote_addrs": self.remote.ctypes.data,
                "lengths": lengths,
                "rkeys": self.rkeys.ctypes.data,
            },
        )
        params = ffi.new(
            "ucp_request_param_t *",
            {
                "op_attr_mask": _OP_DATATYPE | _OP_REMOTE_DATATYPE | _OP_REMOTE | _OP_REMOTE_COUNT,
                "datatype": _DATATYPE_SGL,
                "remote_datatype": _DATATYPE_SGL,
                "remote": remote,
                "remote_count": count,
            },
        )
        address = _address(local)
        return int(lib.ucp_put_nbx(endpoint, address, count, _REMOTE_ADDR_INVALID, ffi.NULL, params))


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))
