"""buildah, which builds images without an engine or a daemon."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster.commands import checked
from tests.cluster.debian import Apt
from tests.deploy.tools import Unavailable

PACKAGES = ("buildah", "debian-archive-keyring", "debootstrap")


class Buildah:
    """With a store of its own, where layers are kept from build to build."""

    def __init__(self, store: Path) -> None:
        self._command = ["buildah", f"--root={store / 'root'}", f"--runroot={store / 'run'}"]

    def __call__(self, *arguments: str) -> str:
        """What it prints.

        Raises:
            Unavailable: it fails.
        """
        return checked([*self._command, *arguments])

    def has(self, image: str) -> bool:
        """Whether it is in the store."""
        return self._succeeds("inspect", "--type=image", image)

    def can_pull(self, image: str) -> bool:
        """Whether its registry can be reached, or it is in the store."""
        return self._succeeds("pull", "--quiet", "--policy=missing", image)

    def _succeeds(self, *arguments: str) -> bool:
        try:
            self(*arguments)
        except Unavailable:
            return False
        return True


def install(apt: Apt) -> None:
    """buildah and debootstrap, from Debian, unless they are there."""
    if not (shutil.which("buildah") and shutil.which("debootstrap")):
        apt.update()
        apt.install(*PACKAGES)
