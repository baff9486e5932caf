"""Which options UCX starts with: this project's defaults, the devices asked for, and what the environment says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pd_common.errors import InvalidRequest, TransportUnavailable
from pd_common.transport.ucx.interface import Binding, Context, Resource, UCXError
from pd_common.transport.ucx.library import UCXLibrary

_PREFIX = "UCX_"
_DEFAULTS = {
    # Zero-copy PUT in peer error handling mode; otherwise UCX emulates PUT in software on every transport.
    "RNDV_THRESH": "inf",
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "256K",
    # Copies per progress call: each call costs a wait for the interpreter lock while other threads run Python code.
    "CMA_TX_QUOTA": "64",
    # A worker that only receives PUTs never counts as active: UCX would wake a thread of its own for every piece.
    "ADAPTIVE_PROGRESS": "n",
}
"""What differs from UCX's own defaults; a user's UCX_* variable wins."""
_OF_ONE_TRANSPORT = {"CMA_TX_QUOTA": "cma"}
"""UCX warns of such an option as of a mistake where it has not got that transport, as in most containers."""

_NO_NETWORK = frozenset({"memory", "cuda"})
"""UCX's names for what carries within a host: no network device."""
_INFINIBAND = Path("/sys/class/infiniband")


def devices_of(ib_device: str | None, infiniband: Path = _INFINIBAND) -> tuple[str, ...]:
    """The network devices in a comma-separated list as UCX names them: an InfiniBand device is meant with port 1.

    Raises:
        InvalidRequest: the list has an empty name.
    """
    if ib_device is None:
        return ()
    names = [name.strip() for name in ib_device.split(",")]
    if not all(names):
        raise InvalidRequest("a device without a name", field="ib_device", value=ib_device)
    return tuple(f"{name}:1" if ":" not in name and (infiniband / name).exists() else name for name in names)


def options_for(devices: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """What is set in UCX's configuration. Devices that were asked for win over the environment, all else yields to it.

    Several devices are several rails: UCX's own default writes over one, however many it may use.
    """
    rails = {"MAX_RMA_RAILS": str(len(devices))} if len(devices) > 1 else {}
    options = {name: value for name, value in (_DEFAULTS | rails).items() if _PREFIX + name not in environment}
    return options | ({"NET_DEVICES": ",".join(devices)} if devices else {})


def shown(options: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Every setting that is not UCX's own default, for a person: the environment's as `UCX_X=y`, ours as `X=y`."""
    of_environment = {name: value for name, value in sorted(environment.items()) if name.startswith(_PREFIX)}
    of_ours = dict(sorted(options.items()))
    return tuple(f"{name}={value}" for name, value in (of_environment | of_ours).items())


def network_devices(resources: Iterable[Resource]) -> tuple[str, ...]:
    """The network devices among them, sorted."""
    return tuple(sorted({each.device for each in resources} - _NO_NETWORK))


def open_context(
    binding: Binding, library: UCXLibrary, devices: Sequence[str], options: Mapping[str, str]
) -> tuple[Context, Mapping[str, str]]:
    """UCX with these options, and those of them that it has a use for.

    Raises:
        TransportUnavailable: UCX does not start, or a device that was asked for is not there.
    """
    try:
        context = binding(library, options)
    except UCXError as error:
        reason = str(error) if not devices else f"{error}; {_there(binding, library, options)}"
        raise TransportUnavailable(f"UCX does not start: {reason}", ucx_library=library.path) from error
    missing = set(devices) - set(network_devices(context.resources))
    if missing:
        context.close()
        names, there = ", ".join(sorted(missing)), _there(binding, library, options)
        raise TransportUnavailable(f"UCX has no network device {names}: {there}", ib_device=names)
    useful = _useful(options, context.resources)
    if useful != options:
        context.close()
        context = binding(library, useful)
    return context, useful


def _useful(options: Mapping[str, str], resources: Iterable[Resource]) -> Mapping[str, str]:
    there = {each.transport for each in resources}
    idle = {name for name, transport in _OF_ONE_TRANSPORT.items() if transport not in there}
    return {name: value for name, value in options.items() if name not in idle}


def _there(binding: Binding, library: UCXLibrary, options: Mapping[str, str]) -> str:
    """Which network devices there are when none is asked for."""
    try:
        context = binding(library, {**options, "NET_DEVICES": "all"})
    except UCXError as error:
        return f"it cannot say which there are: {error}"
    found = network_devices(context.resources)
    context.close()
    return f"there are {', '.join(found)}" if found else "there are none"
