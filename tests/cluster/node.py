"""One node and its control plane, as the first process of namespaces of their own.

Started by `Kube`. When it ends, the kernel ends all the others with it, and their network and mounts are gone.
It ends as soon as one of the programs does, or when whoever started it has gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster import settings
from tests.cluster.api import Api
from tests.cluster.settings import NODE_ADDRESS, Layout, control_groups

TUNED = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
KEYS = ("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes")
TUNED_TO = ("1", "0", "10", "1", "1000000", "25000000")
CTR = ("ctr", "--namespace", "k8s.io")
SHARES = "8192"  # a process outside has 1024
PATIENCE_S = 60.0


def main() -> None:
    layout = Layout(Path(sys.argv[1]))
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    _mounts(layout)
    _control_groups()
    _network()
    settings.write(layout)
    programs: dict[int, str] = {}
    ready = {"containerd": _containerd_answers, "kube-apiserver": Api(layout).ready}
    for name, command in settings.commands(layout).items():
        log = (layout.logs / f"{name}.log").open("wb")
        programs[subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).pid] = name
        if name in ready:
            _wait(name, ready[name])
        if name == "containerd":
            _import_images(layout)
    while True:
        ended, status = os.wait()  # orphans of containers come here too
        if ended in programs:
            sys.exit(f"{programs[ended]} has ended with {os.waitstatus_to_exitcode(status)}, see its log")


def _end_with_the_starter() -> None:
    """Its end of our standard input is closed, by it or by the kernel."""
    sys.stdin.read()
    os._exit(0)


def _mounts(layout: Layout) -> None:
    """What the node writes elsewhere lands in its folder; what kubelet would tune on the machine seems to be tuned."""
    _run("mount", "--make-rshared", "/")
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for place in ("/var/lib", "/var/log"):
        ours = layout.folder / place.strip("/").replace("/", "-")
        ours.mkdir()
        _run("mount", "--bind", str(ours), place)
    for name, value in zip((*TUNED, *KEYS), TUNED_TO, strict=True):
        seeming = layout.folder / name.replace("/", "-")
        seeming.write_text(value)
        _run("mount", "--bind", str(seeming), f"/proc/sys/{name}")


def _control_groups() -> None:
    """Those of all pods are in one, in each hierarchy; beside processes that are in none it counts as several do."""
    for group in control_groups():
        group.mkdir()
        if (shares := group / "cpu.shares").exists():
            shares.write_text(SHARES)


def _network() -> None:
    """A node needs an address that is not loopback; nothing outside can be reached."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "node0", "type", "veth", "peer", "name", "node1")
    _run("ip", "address", "add", f"{NODE_ADDRESS}/32", "dev", "node0")
    for link in ("node0", "node1"):
        _run("ip", "link", "set", link, "up")
    _run("ip", "route", "add", "default", "dev", "node0")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _wait(name: str, ready: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not ready():
        if time.monotonic() > give_up:
            sys.exit(f"{name} does not answer, see its log")
        time.sleep(0.1)


def _containerd_answers() -> bool:
    return not subprocess.run([*CTR, "version"], capture_output=True, check=False).returncode


def _import_images(layout: Layout) -> None:
    for image in layout.images.read_text().splitlines():
        _run(*CTR, "images", "import", image)


def _run(*command: str) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
