"""A stand-in for Docker's Python image where no registry can be reached: Debian, and in it the Python of the tests."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.cluster.buildah import Buildah
from tests.cluster.commands import checked
from tests.deploy.tools import Unavailable

STAND_IN = "localhost/python-stand-in"
RELEASE = "trixie"  # that of the image that it stands in for
NEEDED = (
    "ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8t64,libsqlite3-0,libssl3t64,"
    "libuuid1,netbase,tzdata,zlib1g"
)
SOURCES = f"""\
Types: deb
URIs: http://deb.debian.org/debian
Suites: {RELEASE}
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
KEEP_NOTHING = 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };\n'
LEFT_OUT = shutil.ignore_patterns("site-packages", "__pycache__", "test", "tests", "idlelib", "config-*")


def build_python_image(buildah: Buildah, scratch: Path) -> str:
    """Its name. It is made once.

    Raises:
        Unavailable: no Debian here, or a Python that cannot be copied.
    """
    if buildah.has(STAND_IN):
        return STAND_IN
    if sys.base_prefix == "/usr":
        raise Unavailable("no registry can be reached, and the Python of this machine is part of its system")
    root = scratch / "python"
    checked(["debootstrap", "--variant=minbase", f"--include={NEEDED}", RELEASE, str(root)])
    (root / "etc/apt/sources.list").unlink()
    (root / "etc/apt/sources.list.d/debian.sources").write_text(SOURCES)
    (root / "etc/apt/apt.conf.d/docker-clean").write_text(KEEP_NOTHING)
    _copy_python(Path(sys.base_prefix), root / "usr/local")
    checked(["chroot", str(root), "sh", "-c", "ldconfig && python3 -m ensurepip && ln -s pip3 /usr/local/bin/pip"])
    checked(["chroot", str(root), "apt-get", "clean"])
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, str(root), "/")
    buildah("config", "--env=PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "--env=LANG=C.UTF-8", container)
    buildah("commit", "--quiet", "--rm", container, STAND_IN)
    return STAND_IN


def _copy_python(source: Path, target: Path) -> None:
    """Python finds its library beside its program, wherever the two are."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy2(source / "bin" / name, target / "bin" / name)
    (target / "bin/python3").symlink_to(name)
    (target / "bin/python").symlink_to(name)
    for library in (source / "lib").glob("libpython3*.so*"):
        shutil.copy2(library, target / "lib", follow_symlinks=False)
    shutil.copytree(source / "lib" / name, target / "lib" / name, symlinks=True, ignore=LEFT_OUT)
    (target / "lib" / name / "site-packages").mkdir()
