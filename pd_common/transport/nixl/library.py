"""Finds and loads NIXL's binding (the wheel `nixl-cu12`), and knows what of it has to be avoided.

Only the binding is loaded: the Python layer above it fixes the progress thread's delay at 0, which keeps one core per
agent busy for ever, replaces the logging of the whole process when it is imported, and unpickles what a peer sent.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

from pd_common.errors import TransportUnavailable
from pd_common.transport import rdma

_PACKAGE = "nixl_cu12"
_DISTRIBUTION = "nixl-cu12"
_BINDING = "nixl_cu12._bindings"
_AMAZON = "0x1d0f"


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """The loaded binding, its file and the version of its wheel."""

    binding: Any
    path: str
    version: str


def load_library() -> NixlLibrary:
    """Loads the binding; harmless when that is done.

    Raises:
        TransportUnavailable: the wheel is not installed or does not load.
    """
    package = importlib.util.find_spec(_PACKAGE)
    if package is None:
        raise TransportUnavailable("NIXL is not installed: install the extra `nixl` of this package")
    try:
        binding = sys.modules.get(_BINDING) or _load(list(package.submodule_search_locations or ()))
        version = importlib.metadata.version(_DISTRIBUTION)
    except (ImportError, OSError) as error:
        raise TransportUnavailable(f"NIXL does not load: {error}") from error
    return NixlLibrary(binding, str(binding.__file__), version)


def _load(folders: list[str]) -> Any:
    spec = PathFinder.find_spec(_BINDING, folders)
    if spec is None or spec.loader is None:
        raise ImportError("the package has no _bindings")
    binding = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(binding)
    sys.modules[_BINDING] = binding
    return binding


@contextmanager
def without_unused_efa() -> Iterator[None]:
    """While NIXL's UCX is loaded: leaves its module for EFA out where no such device is.

    That module pulls in the system's libibverbs and libnl beside those of the wheel, and with both in one process the
    wheel 1.5.1 ends every process with a segmentation fault in libnl's clean-up. UCX_MODULES of the user's own stands.
    """
    if "UCX_MODULES" in os.environ or _has_efa():
        yield
        return
    os.environ["UCX_MODULES"] = "^efa"
    try:
        yield
    finally:
        del os.environ["UCX_MODULES"]


def _has_efa() -> bool:
    return any(vendor.read_text().strip() == _AMAZON for vendor in rdma.DEVICES.glob("*/device/vendor"))


def plugin_parameters(devices: Sequence[str], options: Mapping[str, str]) -> dict[str, str]:
    """What NIXL's UCX plugin is started with: UCX options, and the RDMA devices that it may use (none: any)."""
    parameters = {"engine_config": ",".join(f"{name}={value}" for name, value in options.items())}
    return parameters | ({"device_list": ",".join(devices)} if devices else {})


def rdma_devices(asked: str | None) -> tuple[str, ...]:
    """The devices that `--ib-device` names; none means NIXL's own choice.

    Raises:
        InvalidRequest: this machine has no such RDMA device (NIXL would take the first port of one, and nothing else).
    """
    devices = tuple(name.strip() for name in asked.split(",")) if asked else ()
    rdma.require_present(devices, "UCX_NET_DEVICES restricts NIXL to other devices")
    return devices
