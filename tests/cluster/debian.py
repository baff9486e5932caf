"""Debian's packages and sources for a test cluster, through apt lists of its own: the machine's stay as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.cluster.commands import checked
from tests.deploy.tools import Unavailable

RELEASE = "bookworm"  # the last one whose source package of Kubernetes is all of Kubernetes


class Apt:
    """apt-get on the machine's mirror, with sources and lists in a folder of ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
        sources = folder / "sources.list"
        sources.write_text(_sources())
        self._options = [
            f"-oDir::Etc::SourceList={sources}",
            "-oDir::Etc::SourceParts=-",
            f"-oDir::State::Lists={folder / 'lists'}",
            f"-oDir::Cache::pkgcache={folder / 'pkgcache.bin'}",
            f"-oDir::Cache::srcpkgcache={folder / 'srcpkgcache.bin'}",
            "-oAPT::Sandbox::User=root",
            "-oDPkg::Lock::Timeout=600",
        ]

    def update(self) -> None:
        self._run("update", "--quiet")

    def install(self, *packages: str) -> None:
        self._run("install", "--yes", "--quiet", "--no-install-recommends", *packages)

    def unpack(self, folder: Path, *packages: str) -> None:
        """Their files under this folder; nothing is installed, so no daemon is started."""
        debs = self._folder / "debs"
        debs.mkdir(exist_ok=True)
        self._run("download", "--quiet", *packages, cwd=debs)
        for deb in debs.glob("*.deb"):
            checked(["dpkg-deb", "--extract", str(deb), str(folder)])
        shutil.rmtree(debs)

    def source(self, folder: Path, package: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run("source", "--quiet", package, cwd=folder)

    def _run(self, *arguments: str, cwd: Path | None = None) -> None:
        checked(["apt-get", *self._options, *arguments], cwd, os.environ | {"DEBIAN_FRONTEND": "noninteractive"})


def _sources() -> str:
    """What the machine takes from Debian, and the sources of it."""
    if shutil.which("apt-get") is None:
        raise Unavailable("apt-get is missing: the cluster is built from packages of Debian")
    place = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    both = f"--format=deb {place}\ndeb-src {place}"
    query = ["apt-get", "indextargets", both, "Created-By: Packages", "Origin: Debian"]
    known = checked(query)
    if f" {RELEASE} " not in known:
        raise Unavailable(f"apt knows nothing of Debian {RELEASE} here (apt-get update?): the cluster is built from it")
    return known
