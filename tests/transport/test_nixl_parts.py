"""The parts of the NIXL transport that need no peer: address bytes, splitting, its library, the life of its thread."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.errors import InternalError, InvalidRequest, PdError, TransferFailed, TransportUnavailable
from pd_common.transport import rdma
from pd_common.transport.backends import open_transport
from pd_common.transport.base import MemoryRegion, Puts
from pd_common.transport.nixl.library import plugin_parameters, rdma_devices, without_unused_efa
from pd_common.transport.nixl.thread import NixlThread
from pd_common.transport.nixl.transport import FRAME, NixlTransport
from pd_common.transport.nixl.write import split
from pd_common.transport.offer import KeylessOffer
from tests.transport.conftest import skip_unless_importable
from tests.transport.pairs import transport_config

pytestmark = pytest.mark.nixl


@given(st.lists(st.integers(0, 200 << 20), max_size=8), st.integers(0, 5000))
def test_transfers_hold_all_puts_in_order_and_are_bounded(large: list[int], small: int) -> None:
    lengths = np.array([*large, *[32] * small], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.int64)
    transfers = list(split(Puts(starts + 7, starts + 9, lengths)))
    kept = np.stack([starts, lengths], axis=1)[lengths > 0].reshape(-1, 2)
    moved = [np.stack([each.local[:, 0] - 7, each.local[:, 1]], axis=1) for each in transfers]
    assert np.array_equal(np.concatenate([np.empty((0, 2), np.int64), *moved]), kept)
    for each in transfers:
        assert np.array_equal(each.local[:, 0] + 2, each.remote[:, 0])
        assert np.array_equal(each.local[:, 1:], each.remote[:, 1:])
        assert 1 <= len(each.local) <= 2048
        assert len(each.local) == 1 or each.local[:, 1].sum() <= 64 << 20


def test_devices_are_named_and_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    assert rdma_devices(None) == ()
    assert rdma_devices("mlx5_0, mlx5_1") == ("mlx5_0", "mlx5_1")
    parameters = plugin_parameters(rdma_devices("mlx5_0, mlx5_1"), {"X": "1", "Y": "n"})
    assert parameters == {"engine_config": "X=1,Y=n", "device_list": "mlx5_0,mlx5_1"}
    for wrong in ("mlx5_2", "mlx5_0,", "mlx5_0,eth0"):
        with pytest.raises(InvalidRequest, match=r"mlx5_0, mlx5_1.*UCX_NET_DEVICES"):
            rdma_devices(wrong)


def test_the_module_for_efa_is_left_out_only_where_there_is_no_efa(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    monkeypatch.delenv("UCX_MODULES", raising=False)
    with without_unused_efa():
        assert os.environ["UCX_MODULES"] == "^efa"
    assert "UCX_MODULES" not in os.environ
    vendor = tmp_path / "rdmap0" / "device" / "vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1d0f\n")
    with without_unused_efa():
        assert "UCX_MODULES" not in os.environ
    vendor.write_text("0x15b3\n")
    monkeypatch.setenv("UCX_MODULES", "cma")
    with without_unused_efa():
        assert os.environ["UCX_MODULES"] == "cma"
    assert os.environ["UCX_MODULES"] == "cma"


def test_without_the_wheel_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TransportUnavailable, match="extra `nixl`"):
        open_transport(transport_config("nixl"))


async def test_metadata_that_nixl_cannot_read_is_refused() -> None:
    skip_unless_importable("nixl")
    transport = NixlTransport()
    region = MemoryRegion(4096, 4096)
    with pytest.raises(TransferFailed):
        await transport.connect(KeylessOffer(b"no metadata of NIXL's", region, ()).pack(FRAME))
    await transport.close()


def test_a_process_that_used_nixl_ends_well_and_keeps_its_logging() -> None:
    skip_unless_importable("nixl")
    script = (
        "import asyncio, logging, sys\n"
        "from pd_common.transport.nixl.transport import NixlTransport\n"
        "transport = NixlTransport()\n"
        "asyncio.run(transport.close())\n"
        "assert logging.raiseExceptions\n"
        "assert 'nixl_cu12._api' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60, env=environment).returncode == 0


class _Broken:
    """What a defect on the NIXL thread looks like."""

    waiting = True

    def __init__(self) -> None:
        self.error: Future[PdError] = Future()

    def register(self, _: MemoryRegion, /) -> None:
        raise AssertionError

    def drive(self) -> bool:
        raise ZeroDivisionError

    def break_off(self, error: PdError) -> None:
        self.error.set_result(error)


def test_a_defect_on_the_thread_reaches_everyone_who_waits() -> None:
    thread = NixlThread("broken")
    broken = _Broken()
    thread.submit(lambda: thread.add(broken))
    assert isinstance(broken.error.result(timeout=20), InternalError)
    with pytest.raises(InternalError, match="NIXL thread died"):
        thread.died.result(timeout=20)
    with pytest.raises(InternalError):
        thread.submit(lambda: None).result(timeout=20)
    assert not thread.closed
    thread.stop()


def test_a_stopped_thread_refuses_commands() -> None:
    thread = NixlThread("stopped")
    assert thread.submit(lambda: 7).result(timeout=20) == 7
    thread.stop()
    thread.stop()
    assert thread.closed
    assert not thread.died.done()
    with pytest.raises(TransferFailed):
        thread.submit(lambda: 7).result(timeout=20)


async def test_commands_run_while_a_write_is_on_its_way() -> None:
    thread = NixlThread("busy")
    waiting = _Waiting(thread.remove)
    thread.submit(lambda: thread.add(waiting))
    await asyncio.wrap_future(waiting.driven_often)
    await asyncio.wrap_future(thread.submit(lambda: waiting.break_off(TransferFailed("enough"))))
    thread.stop()


class _Waiting:
    """Never gets anywhere; counts how often it was asked."""

    waiting = True

    def __init__(self, remove: Callable[[_Waiting], None]) -> None:
        self.driven_often: Future[None] = Future()
        self._remove = remove
        self._driven = 0

    def register(self, _: MemoryRegion, /) -> None:
        raise AssertionError

    def drive(self) -> bool:
        self._driven += 1
        if self._driven == 10:
            self.driven_often.set_result(None)
        return False

    def break_off(self, _: PdError, /) -> None:
        self._remove(self)
