from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pd.v1 import error_reason_pb2

from pd_common.errors import Reason

PROTO = Path(__file__).resolve().parents[2] / "proto"
STUBS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def stubs_of(root: Path) -> dict[str, bytes]:
    """Every generated file below `root`, by its path there."""
    files = [path for pattern in STUBS for path in root.glob(f"pd/**/{pattern}")]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def assert_fresh(generated: dict[str, bytes]) -> None:
    committed = stubs_of(PROTO)
    assert committed.keys() == generated.keys()
    assert [name for name in committed if committed[name] != generated[name]] == []


def test_the_committed_stubs_are_what_the_protos_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("proto_generate", PROTO / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    generate.generate(tmp_path)

    assert_fresh(stubs_of(tmp_path))


def test_stubs_are_made_without_an_activated_environment(tmp_path: Path) -> None:
    """The interpreter that runs it is all that generate.py is told of its environment."""
    command = [sys.executable, str(PROTO / "generate.py"), "--out", str(tmp_path)]
    made = subprocess.run(command, env={"PATH": os.defpath}, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert_fresh(stubs_of(tmp_path))


def test_every_reason_is_on_the_wire_and_nothing_else() -> None:
    wire = {name.removeprefix("ERROR_REASON_") for name in error_reason_pb2.ErrorReason.keys()}  # noqa: SIM118  not a dict
    assert wire - {"UNSPECIFIED"} == {reason.value for reason in Reason}


def test_no_reason_is_the_unset_value() -> None:
    assert error_reason_pb2.ERROR_REASON_UNSPECIFIED == 0
    assert {reason.name for reason in Reason} == {reason.value for reason in Reason}
