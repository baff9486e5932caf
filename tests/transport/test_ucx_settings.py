"""Which devices and options UCX is started with, and what is said of them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from pd_common.control.process import announce
from pd_common.errors import InvalidRequest, TransportUnavailable
from pd_common.transport.ucx.interface import Resource, carrier_in, resources_in
from pd_common.transport.ucx.settings import devices_of, network_devices, options_for, shown
from pd_common.transport.ucx.transport import UcxTransport
from pd_common.transport.ucx.ucx_py import UcxPyContext


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, ()),
        ("eth0", ("eth0",)),
        ("mlx5_0", ("mlx5_0:1",)),
        ("mlx5_0,mlx5_1:2", ("mlx5_0:1", "mlx5_1:2")),
        (" mlx5_0 , eth0 ", ("mlx5_0:1", "eth0")),
    ],
)
def test_devices_that_are_asked_for(asked: str | None, expected: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    assert devices_of(asked, infiniband=tmp_path) == expected


@pytest.mark.parametrize("asked", ["", "mlx5_0,", ",eth0", " "])
def test_a_device_without_a_name(asked: str) -> None:
    with pytest.raises(InvalidRequest):
        devices_of(asked)


def test_the_environment_wins_but_over_the_devices_that_are_asked_for() -> None:
    environment = {"UCX_RNDV_THRESH": "8k", "UCX_NET_DEVICES": "eth9", "PATH": "/bin"}
    options = options_for((), environment)
    assert "RNDV_THRESH" not in options
    assert "NET_DEVICES" not in options
    assert options_for(("mlx5_0:1",), environment)["NET_DEVICES"] == "mlx5_0:1"


def test_several_devices_are_several_rails() -> None:
    assert "MAX_RMA_RAILS" not in options_for(("a",), {})
    assert options_for(("a", "b"), {})["MAX_RMA_RAILS"] == "2"
    assert "MAX_RMA_RAILS" not in options_for(("a", "b"), {"UCX_MAX_RMA_RAILS": "1"})


def test_every_setting_is_shown() -> None:
    environment = {"UCX_TLS": "rc", "UCX_NET_DEVICES": "eth9", "HOME": "/"}
    assert shown({"NET_DEVICES": "eth0", "A": "1"}, environment) == (
        "UCX_NET_DEVICES=eth9",
        "UCX_TLS=rc",
        "A=1",
        "NET_DEVICES=eth0",
    )


@pytest.mark.parametrize(
    ("words", "carrier"),
    [
        ("{proto|init} put from host memory length 65536 zero-copy cma/memory 10084.1 MB/s 6.20 us", "cma"),
        ("put from host memory length 65536 zero-copy tcp/lo 11.8 MB/s 5307.05 us", "tcp/lo"),
        ("zero-copy 52% on tcp/lo and 48% on tcp/eth0 22.3 MB/s 2806.34 us", "tcp/lo+tcp/eth0"),
        ("put from cuda memory zero-copy rc_mlx5/mlx5_0:1 24154.6 MB/s 3.00 us", "rc_mlx5/mlx5_0:1"),
        ("", "unknown"),
    ],
)
def test_the_carrier_in_the_words_of_ucx(words: str, carrier: str) -> None:
    assert carrier_in(words) == carrier


def test_resources_in_the_words_of_ucx() -> None:
    printed = (
        "#  resource 0  :  md 0  dev 0  flags -- self/memory\n#  resource 1 :  md 1 dev 1 flags -a rc_verbs/mlx5_0:1"
    )
    resources = resources_in(printed)
    assert resources == (Resource("self", "memory"), Resource("rc_verbs", "mlx5_0:1"))
    assert network_devices(resources) == ("mlx5_0:1",)


@pytest.mark.parametrize("transports", [None, "tcp,self", "tcp"])
async def test_a_device_that_is_not_there(transports: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    with pytest.raises(TransportUnavailable, match=r"there are .*\blo\b"):
        UcxTransport(ib_device="lo,mlx5_77")
    with pytest.raises(TransportUnavailable, match=r"there are .*\blo\b"):
        UcxTransport(ib_device="mlx5_77")


async def test_the_log_at_start_says_what_carries_the_data(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    transport = UcxTransport(ib_device="lo")
    with caplog.at_level(logging.INFO):
        announce("serving", transport.info)
    await transport.close()
    library, transports, devices, settings, what = caplog.messages
    assert transport.info.version in library
    assert transport.info.library in library
    assert transports.endswith(" self tcp")
    assert devices.endswith(" lo")
    assert {"UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo", "NET_DEVICES=lo", "RNDV_THRESH=inf"} <= set(settings.split())
    assert what == "serving"


async def test_a_device_that_is_asked_for_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "nothing")
    transport = UcxTransport(ib_device="lo")
    assert transport.info.devices == ("lo",)
    assert {"UCX_NET_DEVICES=nothing", "NET_DEVICES=lo"} < set(transport.info.settings)
    await transport.close()


def test_a_binding_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucp", None)
    with pytest.raises(TransportUnavailable, match="conda"):
        UcxTransport(binding=UcxPyContext)


async def test_no_option_is_set_for_a_transport_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    transport = UcxTransport()
    await transport.close()
    assert "RNDV_THRESH=inf" in transport.info.settings
    assert not [setting for setting in transport.info.settings if setting.startswith("CMA_")], "UCX would warn of it"
