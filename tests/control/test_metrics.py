from __future__ import annotations

import logging
import re
import ssl
from pathlib import Path

import httpx
import pytest

from pd_common.control import metrics
from pd_common.control.metrics import PoolCollector
from pd_common.control.rooms import PoolStatus
from pd_common.control.server import ControlServer
from pd_common.errors import InvalidRequest
from tests.control.certificates import Authority
from tests.control.serving import LOOPBACK


async def test_what_is_scraped_is_what_the_pools_are_doing_now(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, metrics.__name__)
    pools = [PoolStatus(100, 50, 10, 8, 5, 1, 3, 20, 6, 2, 11), PoolStatus(100, 100, 0, 8, 8, 0, 0)]
    async with metrics.served([PoolCollector(lambda: pools[0])], LOOPBACK, 0), httpx.AsyncClient() as client:
        found = re.search(r"http://\S+/metrics", caplog.text)
        assert found is not None
        assert samples((await client.get(found[0])).text) == {
            'pd_kv_pages{state="free"}': 50,
            'pd_kv_pages{state="used"}': 20,
            'pd_kv_pages{state="quarantined"}': 10,
            'pd_kv_pages{state="cached"}': 20,
            'pd_metadata_slots{state="free"}': 5,
            'pd_metadata_slots{state="used"}': 2,
            'pd_metadata_slots{state="quarantined"}': 1,
            "pd_rooms_live": 3,
            "pd_requests_queued": 6,
            "pd_requests_retracted": 2,
            "pd_kv_pages_on_host": 11,
        }
        del pools[0]
        assert samples((await client.get(found[0])).text)['pd_kv_pages{state="quarantined"}'] == 0
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(found[0])


async def test_a_taken_port_is_an_error_that_names_the_option(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, metrics.__name__)
    async with metrics.served([], LOOPBACK, 0):
        port = int(caplog.text.rpartition(":")[2].partition("/")[0])
        with pytest.raises(InvalidRequest) as raised:
            await metrics.served([], LOOPBACK, port).__aenter__()
        assert raised.value.metadata == {"field": "metrics_port"}


async def test_without_a_port_nothing_is_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, metrics.__name__)
    async with metrics.served([], LOOPBACK, None):
        assert not caplog.text


async def test_the_errors_of_a_server_are_scraped_over_tls_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, metrics.__name__)
    files = Authority(tmp_path).issue("metrics", to="prefill")
    control = ControlServer([])
    control.errors.labels("pd.v1.Abort/AbortRoom", "INVALID_REQUEST").inc(2)
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    async with metrics.served([control.errors], LOOPBACK, 0, files.tls()), httpx.AsyncClient(verify=context) as client:
        found = re.search(r"https://\S+/metrics", caplog.text)
        assert found is not None
        answer = await client.get(found[0], extensions={"sni_hostname": "metrics"})
    counted = samples(answer.text)
    assert counted['pd_rpc_errors_total{method="pd.v1.Abort/AbortRoom",reason="INVALID_REQUEST"}'] == 2
    await control.stop(grace_s=0.0)


def samples(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}
