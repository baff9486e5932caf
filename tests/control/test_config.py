from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pd_common import config
from pd_common.config import ListenConfig, ModelConfig, RankConfig, RoomConfig, TransportConfig
from pd_common.scheduling import DecodeConfig, SchedulingConfig, decode_options, scheduling_options
from pd_common.types import BootstrapAddress, RankPosition
from services.prefill.__main__ import main as prefill
from services.router.__main__ import main


@click.command(context_settings=config.CONTEXT)
@config.model_options
@scheduling_options
@decode_options
@config.listen_options(port=8998)
@config.rank_options
@config.transport_options
@config.room_options
@config.log_options
@config.metrics_options
@click.option("--peer", "peers", multiple=True, type=config.ADDRESS)
def engine(**options: Any) -> None:
    """Something with all options of an engine process."""


def parse(*args: str) -> dict[str, Any]:
    return engine.make_context("engine", [*args]).params


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(os.environ):
        if name.startswith("PD_"):
            monkeypatch.delenv(name)


def test_defaults_are_whole_settings() -> None:
    options = parse("--model", "m")
    assert config.pick(ModelConfig, options) == ModelConfig(Path("m"), "auto", "auto", None, 16, 65536, None)
    steps = SchedulingConfig(
        32, 2048, enable_prefix_cache=True, max_queued_requests=1024, queue_timeout_s=60.0, check_integrity=False
    )
    assert config.pick(SchedulingConfig, options) == steps
    growth = config.pick(DecodeConfig, options)
    assert (growth.num_reserved_decode_tokens, growth.rows, growth.host_pages) == (512, 64, 4096)
    assert config.pick(ListenConfig, options) == ListenConfig("127.0.0.1", 8998, None, None)
    assert config.pick(TransportConfig, options) == TransportConfig("ucx", "wheel", "own", None, digest=True)
    assert config.pick(RoomConfig, options) == RoomConfig(30.0, 300.0, 300.0, 300.0)


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_MODEL", "from-environment")
    monkeypatch.setenv("PD_PAGE_SIZE", "32")
    monkeypatch.setenv("PD_PORT", "7000")
    monkeypatch.setenv("PD_DIGEST", "false")
    options = parse("--port", "7001")
    assert (options["model"], options["page_size"]) == (Path("from-environment"), 32)
    assert (options["port"], options["digest"]) == (7001, False)
    assert options["max_running_requests"] == 32


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["--model-path", "m2"], "model", Path("m2")),
        (["--disaggregation-bootstrap-port", "9000"], "port", 9000),
        (["--disaggregation-transfer-backend", "ucx"], "transfer_backend", "ucx"),
        (["--max-total-tokens", "1024"], "kv_cache_tokens", 1024),
        (["--disaggregation-decode-extra-slots", "3"], "decode_extra_slots", 3),
    ],
)
def test_sglang_names_mean_the_same(args: list[str], name: str, value: object) -> None:
    assert parse("--model", "m", *args)[name] == value


FLAGS = [option for option in engine.params if isinstance(option, click.Option) and option.name != "peers"]


@pytest.mark.parametrize(
    ("args", "environment", "enabled"),
    [
        ([], {}, True),
        (["--no-enable-prefix-cache"], {}, False),
        (["--disable-radix-cache"], {}, False),
        ([], {"PD_ENABLE_PREFIX_CACHE": "false"}, False),
    ],
    ids=["default", "own name", "SGLang's name", "environment"],
)
def test_prefill_may_be_told_to_keep_no_prefixes(
    monkeypatch: pytest.MonkeyPatch, args: list[str], environment: dict[str, str], enabled: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert prefill.make_context("pd-prefill", ["--model", "m", *args]).params["enable_prefix_cache"] is enabled


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_option_is_the_environment_variable_of_its_name(
    flag: click.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--page-size` is PD_PAGE_SIZE, says the help of every command: a value that is refused was read."""
    variable = "PD_" + flag.opts[0].removeprefix("--").replace("-", "_").upper()
    names = ("dtype", "device", "host", "advertise_host", "advertise_interface", "ucx_library", "ib_device", "model")
    values = dict.fromkeys(names, "x")
    monkeypatch.setenv(variable, values.get(str(flag.name), "certainly not valid"))
    args = [] if flag.name == "model" else ["--model", "m"]
    if flag.name in values:
        assert str(parse(*args)[str(flag.name)]) == "x"
    else:
        with pytest.raises(click.UsageError, match="certainly not valid"):
            parse(*args)


@pytest.mark.parametrize(
    "args",
    [
        ["--page-size", "0"],
        ["--page-size", "65537"],
        ["--kv-cache-tokens", "0"],
        ["--max-running-requests", "0"],
        ["--threads", "0"],
        ["--port", "65536"],
        ["--transfer-backend", "carrier-pigeon"],
        ["--log-level", "loud"],
        ["--metrics-port", "65536"],
    ],
    ids=" ".join,
)
def test_a_setting_out_of_range_is_refused_with_its_name(args: list[str]) -> None:
    with pytest.raises(click.BadParameter) as raised:
        parse("--model", "m", *args)
    assert args[0] in raised.value.format_message()


@pytest.mark.parametrize(
    "args",
    [
        ["--drain-timeout", "-1"],
        ["--room-retention", "4.9"],
        ["--bootstrap-timeout", "0"],
        ["--bootstrap-timeout", "2"],
        ["--waiting-timeout", "-5"],
        ["--waiting-timeout", "nan"],
        ["--waiting-timeout", "inf"],
    ],
    ids=" ".join,
)
def test_a_wait_that_cannot_work_stops_the_process_at_start(args: list[str]) -> None:
    """Before the model is looked for."""
    started = CliRunner().invoke(prefill, ["--model", "nowhere", *args])
    assert started.exit_code == 1
    assert args[0] in started.output


@pytest.mark.parametrize("name", ["PD_DISAGGREGATION_{}_TIMEOUT", "PD_{}_TIMEOUT"])
def test_waits_are_set_by_the_environment_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name.format("BOOTSTRAP"), "7.5")
    monkeypatch.setenv(name.format("WAITING"), "8")
    rooms = config.pick(RoomConfig, parse("--model", "m"))
    assert (rooms.bootstrap_timeout_s, rooms.waiting_timeout_s) == (7.5, 8.0)
    assert parse("--model", "m", "--disaggregation-waiting-timeout", "9")["waiting_timeout_s"] == 9.0


def test_a_model_is_required() -> None:
    with pytest.raises(click.MissingParameter) as raised:
        parse()
    assert "--model" in raised.value.format_message()


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (16, 1), (17, 2), (65536, 4096)])
def test_a_pool_holds_at_least_the_tokens_that_were_asked_for(tokens: int, pages: int) -> None:
    options = parse("--model", "m", "--kv-cache-tokens", str(tokens))
    assert config.pick(ModelConfig, options).num_pages == pages


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], RankPosition()),
        (["--dp-size", "4"], RankPosition(0, 4)),
        (["--dp-rank", "3", "--dp-size", "4"], RankPosition(3, 4)),
    ],
)
def test_a_rank_stands_alone_unless_said_otherwise(args: list[str], expected: RankPosition) -> None:
    place = config.pick(RankConfig, parse("--model", "m", *args))
    assert place.position == expected
    assert place.bootstrap is None


def test_a_rank_may_register_elsewhere() -> None:
    place = config.pick(RankConfig, parse("--model", "m", "--bootstrap", "prefill-0.svc:8998"))
    assert place.bootstrap == BootstrapAddress("prefill-0.svc", 8998)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--dp-rank", "1"], "--dp-rank 1 is not one of --dp-size 1"),
        (["--dp-rank", "4", "--dp-size", "4"], "--dp-rank 4 is not one of --dp-size 4"),
        (["--dp-rank", "-1"], "--dp-rank"),
        (["--dp-size", "0"], "--dp-size"),
        (["--bootstrap", "prefill-0"], "'prefill-0' is not HOST:PORT"),
        (["--host", "127.0.0.1", "--advertise-interface", "no-such-interface"], "no network interface"),
        (["--advertise-host", "0.0.0.0"], "cannot be advertised: give --advertise-host"),  # noqa: S104
    ],
)
def test_an_impossible_place_stops_the_process_at_start(args: list[str], said: str) -> None:
    """Before the model is looked for."""
    started = CliRunner().invoke(prefill, ["--model", "nowhere", *args])
    assert started.exit_code != 0
    assert said in started.output


@pytest.mark.parametrize(
    ("given", "host", "port", "target"),
    [
        ("127.0.0.1:8998", "127.0.0.1", 8998, "127.0.0.1:8998"),
        ("prefill-0.svc:1", "prefill-0.svc", 1, "prefill-0.svc:1"),
        ("[::1]:65535", "::1", 65535, "[::1]:65535"),
    ],
)
def test_an_address_is_host_and_port(given: str, host: str, port: int, target: str) -> None:
    (address,) = parse("--model", "m", "--peer", given)["peers"]
    assert address == BootstrapAddress(host, port)
    assert address.target == target


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "host",
        "host:",
        ":80",
        "host:port",
        "host:0",
        "host:65536",
        "host:-1",
        "host:8 0",
        "::1",
        "::1:80",
        "[::1:80",
    ],
)
def test_what_is_no_address_is_refused_with_what_was_given(wrong: str) -> None:
    with pytest.raises(click.BadParameter) as raised:
        parse("--model", "m", "--peer", wrong)
    assert repr(wrong) in raised.value.message


def test_the_router_reads_many_addresses_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_PREFILL", "a:1 b:2")
    monkeypatch.setenv("PD_DECODE", "[::1]:3")
    options = main.make_context("pd-router", []).params
    assert options["prefills"] == (BootstrapAddress("a", 1), BootstrapAddress("b", 2))
    assert options["decodes"] == (BootstrapAddress("::1", 3),)


def test_the_router_explains_every_option() -> None:
    shown = CliRunner().invoke(main, ["--help"])
    assert shown.exit_code == 0
    for name in ("--prefill", "--decode", "--host", "--http-port", "--grpc-port", "--log-level"):
        assert name in shown.output
    assert all(option.help for option in main.params if isinstance(option, click.Option))
