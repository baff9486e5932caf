"""Finds and loads Mooncake's transfer engine, and says what to do where it cannot be loaded."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pd_common.addresses import own_address
from pd_common.errors import TransportUnavailable

_MODULE = "mooncake.engine"
_DISTRIBUTION = "mooncake-transfer-engine-non-cuda"
_SETTINGS = {
    # A peer that stands still holds up the write to it, and the end of the channel, for this long; Mooncake's 30 s are
    # more than a room may take to end.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_LOG_LEVEL": "ERROR",
}
"""What differs from Mooncake's own defaults; a user's variable wins."""
_OWN_HOST = "MC_TCP_BIND_ADDRESS"
_FREE_ENGINE = "_ZN8mooncake14TransferEngine10freeEngineEv"


@dataclass(frozen=True, slots=True)
class MooncakeLibrary:
    """The loaded library, its file and the version of its wheel.

    `free_engine` takes down what is behind an engine's pointer while other threads run Python: the destructor of the
    Python object holds the interpreter lock for up to a second. None where the library does not export it.
    """

    new_engine: Callable[[], Any]
    free_engine: Callable[[int], int] | None
    path: str
    version: str


def load_library() -> MooncakeLibrary:
    """Loads the library; harmless when that is done.

    Raises:
        TransportUnavailable: it is not installed, or a library of the system that it needs is not.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module(_MODULE)
        version = importlib.metadata.version(_DISTRIBUTION)
    except ModuleNotFoundError as error:
        raise TransportUnavailable("Mooncake is not installed: install the extra `mooncake` of this package") from error
    except ImportError as error:
        raise TransportUnavailable(
            f"Mooncake does not load: {error}. It needs libibverbs1, libnl-3-200 and libnl-route-3-200 (names of "
            "Debian's packages), without RDMA hardware too"
        ) from error
    path = str(module.__file__)
    return MooncakeLibrary(module.TransferEngine, _free_engine(path), path, version)


def _free_engine(path: str) -> Callable[[int], int] | None:
    function = getattr(ctypes.CDLL(path), _FREE_ENGINE, None)
    if function is None:
        return None
    function.argtypes, function.restype = (ctypes.c_void_p,), ctypes.c_int
    free: Callable[[int], int] = function
    return free


def own_host() -> str:
    """Where peers reach this process: MC_TCP_BIND_ADDRESS, else this host's own address, else loopback."""
    return os.environ.get(_OWN_HOST) or own_address() or "127.0.0.1"
