"""The programs of a one-node Kubernetes, built and unpacked once into the cache.

`python -m tests.cluster.build` does that alone.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.commands import checked
from tests.cluster.debian import Apt
from tests.deploy.tools import Unavailable, cache_folder

VERSION = "1.20.2"
SOURCE_FOLDER = "kubernetes-1.20.5+really1.20.2"
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
BUILD_TOOLS = ("dpkg-dev", "gcc", "golang-go", "jq", "libc6-dev", "make", "rsync")
NODE_TOOLS = ("conntrack", "curl", "iproute2", "iptables", "openssl", "util-linux")
NODE_PROGRAMS = ("containerd", "containernetworking-plugins", "etcd-server", "runc")


@dataclass(frozen=True, slots=True)
class Programs:
    """Where they are."""

    kubernetes: Path
    debian: Path

    @property
    def path(self) -> str:
        """PATH for the processes of the node."""
        debian = [str(self.debian / folder) for folder in ("usr/bin", "usr/sbin")]
        return os.pathsep.join([str(self.kubernetes), *debian, "/usr/sbin", "/usr/bin", "/sbin", "/bin"])

    @property
    def cni_plugins(self) -> Path:
        return self.debian / "usr/lib/cni"


def programs() -> Programs:
    """Builds and unpacks what is not in the cache: minutes the first time, nothing later."""
    if os.geteuid():
        raise Unavailable("a node of Kubernetes needs root")
    home = cache_folder()
    home.mkdir(parents=True, exist_ok=True)
    kubernetes, debian = home / f"kubernetes-{VERSION}", home / "debian"
    if not (kubernetes.is_dir() and debian.is_dir()):
        with tempfile.TemporaryDirectory(dir=home, prefix=".building-") as scratch:
            _make(Path(scratch), kubernetes, debian)
    return Programs(kubernetes, debian)


def _make(scratch: Path, kubernetes: Path, debian: Path) -> None:
    print(f"building Kubernetes {VERSION}, once: ten minutes of processor time, 3 GB of disk meanwhile")
    apt = Apt(scratch / "apt")
    apt.update()
    apt.install(*NODE_TOOLS)
    if not debian.is_dir():
        apt.unpack(scratch / "debian", *NODE_PROGRAMS)
        (scratch / "debian").rename(debian)
    if not kubernetes.is_dir():
        apt.install(*BUILD_TOOLS)
        apt.source(scratch, "kubernetes")
        _compile(scratch / SOURCE_FOLDER).rename(kubernetes)


def _compile(source: Path) -> Path:
    """As Debian's own rules do it: a GOPATH with the tree in it, and make, which writes the generated files too."""
    inside = source / ".go/src/k8s.io"
    inside.mkdir(parents=True)
    (inside / "kubernetes").symlink_to("../../..")
    major, minor, _ = VERSION.split(".")
    environment = os.environ | {
        "GOPATH": str(source / ".go"),
        "GOCACHE": str(source / ".gocache"),
        "HOME": str(source / ".home"),
        "GO111MODULE": "off",
        "CGO_ENABLED": "0",
        "KUBE_GIT_VERSION": f"v{VERSION}",
        "KUBE_GIT_MAJOR": major,
        "KUBE_GIT_MINOR": minor,
        "KUBE_GIT_COMMIT": "debian",
        "KUBE_GIT_TREE_STATE": "clean",
    }
    what = " ".join(f"cmd/{component}" for component in COMPONENTS)
    checked(["make", f"WHAT={what}"], source, environment)
    made = (source / "_output/bin").resolve()
    pause = ["gcc", "-Os", "-static", f"-DVERSION={VERSION}", "-o", str(made / "pause"), "build/pause/linux/pause.c"]
    checked(pause, source, environment)
    return made


if __name__ == "__main__":
    try:
        print(f"Kubernetes {VERSION} is in {programs().kubernetes}")
    except Unavailable as why:
        print(f"no cluster on this machine: {why}")
