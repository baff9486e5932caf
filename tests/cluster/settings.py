"""How each program of the node is set: its files and its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

NODE_ADDRESS = "192.168.113.1"
SERVICES = "10.96.0.0/16"
PODS = "10.244.0.0/24"
PAUSE_IMAGE = "pd-handoff.test/pause:1"
CGROUP = "pd-handoff-cluster"
API_PORT = 6443
DOMAIN = "cluster.local"
ETCD = "http://127.0.0.1:2379"
TOKEN = "admin-of-the-test-cluster"  # noqa: S105 - the API is to be reached from the node's own network alone


@dataclass(frozen=True, slots=True)
class Layout:
    """Files of one cluster while it lives."""

    folder: Path

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def api_certificate(self) -> Path:
        """The API server makes it when it starts, with that of its issuer."""
        return self.pki / "apiserver.crt"

    @property
    def images(self) -> Path:
        """Names the archives that containerd imports, one a line."""
        return self.folder / "images"

    @property
    def cni_plugins(self) -> Path:
        """A link to where they are."""
        return self.folder / "cni-plugins"

    @property
    def pki(self) -> Path:
        return self.folder / "pki"


def control_groups() -> list[Path]:
    """Where the pods are, in every hierarchy of the machine."""
    hierarchies = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines() if " cgroup" in line]
    return [hierarchy / CGROUP for hierarchy in hierarchies]


def write(layout: Layout) -> None:
    """All files that the programs read."""
    layout.pki.mkdir()
    key = ["openssl", "genrsa", "-out", str(layout.pki / "sa.key"), "2048"]
    subprocess.run(key, capture_output=True, check=True)
    (layout.pki / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    layout.kubeconfig.write_text(json.dumps(_kubeconfig(layout)))
    (layout.folder / "resolv.conf").write_text("")
    (layout.folder / "kubelet.yaml").write_text(json.dumps(_kubelet(layout)))
    (layout.folder / "containerd.toml").write_text(_containerd(layout))
    (layout.folder / "cni").mkdir()
    (layout.folder / "cni/10-pods.conflist").write_text(json.dumps(_cni()))


def commands(layout: Layout) -> dict[str, list[str]]:
    """In the order in which they are started."""
    kubeconfig = f"--kubeconfig={layout.kubeconfig}"
    return {
        "containerd": ["containerd", f"--config={layout.folder / 'containerd.toml'}"],
        "etcd": [
            "etcd",
            f"--data-dir={layout.folder / 'etcd'}",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--unsafe-no-fsync",
        ],
        "kube-apiserver": [
            "kube-apiserver",
            f"--etcd-servers={ETCD}",
            f"--advertise-address={NODE_ADDRESS}",
            f"--secure-port={API_PORT}",
            f"--cert-dir={layout.pki}",
            f"--service-cluster-ip-range={SERVICES}",
            f"--service-account-key-file={layout.pki / 'sa.key'}",
            f"--service-account-signing-key-file={layout.pki / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={layout.pki / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "kube-controller-manager": [
            "kube-controller-manager",
            kubeconfig,
            f"--service-account-private-key-file={layout.pki / 'sa.key'}",
            f"--root-ca-file={layout.api_certificate}",
            "--leader-elect=false",
        ],
        "kube-scheduler": ["kube-scheduler", kubeconfig, "--leader-elect=false"],
        "kubelet": [
            "kubelet",
            kubeconfig,
            f"--config={layout.folder / 'kubelet.yaml'}",
            f"--root-dir={layout.folder / 'kubelet'}",
            f"--volume-plugin-dir={layout.folder / 'volume-plugins'}",
            "--container-runtime=remote",
            "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
            "--hostname-override=node",
            f"--node-ip={NODE_ADDRESS}",
        ],
        "kube-proxy": [
            "kube-proxy",
            kubeconfig,
            "--hostname-override=node",
            "--proxy-mode=iptables",
            f"--cluster-cidr={PODS}",
            "--oom-score-adj=0",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
        ],
        "dns": [sys.executable, "-m", "tests.cluster.dns", str(layout.folder)],
    }


def _kubeconfig(layout: Layout) -> dict[str, object]:
    cluster = {"server": f"https://{NODE_ADDRESS}:{API_PORT}", "certificate-authority": str(layout.api_certificate)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "current-context": "test",
    }


def _kubelet(layout: Layout) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "enforceNodeAllocatable": [],
        "oomScoreAdj": 0,
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": DOMAIN,
        "resolvConf": str(layout.folder / "resolv.conf"),
        "failSwapOn": False,
        "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "memory.available": "0%"},
        "imageGCHighThresholdPercent": 100,
    }


def _containerd(layout: Layout) -> str:
    """Neither AppArmor nor a lower OOM score than its own may be there for it to give."""
    return f"""
version = 2
root = "{layout.folder / "containerd"}"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
disable_apparmor = true
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{layout.cni_plugins}"
conf_dir = "{layout.folder / "cni"}"
"""


def _cni() -> dict[str, object]:
    """A routed link for each pod: what goes from pod to pod passes the rules of kube-proxy without a bridge module."""
    addresses = {"type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}]}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "ptp", "ipMasq": False, "ipam": addresses}]}
