"""The image of deploy/docker/Dockerfile as an archive in the cache, built by buildah: no Docker engine is needed.

`python -m tests.cluster.image` does that alone. A machine that reaches registries builds exactly what `docker build`
does. On one that does not, a stand-in takes the place of the Python image, and PyTorch comes from where this machine's
pip finds it; all else is the Dockerfile's own.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from tests.cluster.buildah import Buildah, install
from tests.cluster.commands import checked
from tests.cluster.debian import Apt
from tests.cluster.python_image import build_python_image
from tests.deploy.tools import Unavailable, cache_folder

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
IMAGE = f"docker.io/library/pd-handoff:{metadata.version('pd-handoff')}"
CONTEXT = ("pyproject.toml", "constraints.txt", "README.md", "proto", "pd_common", "services", "demo/shakespeare")
OF_THIS_MACHINE = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pip.conf"))
PYTHON_IMAGE = "docker.io/library/python:3.11-slim-trixie"


def image_archive() -> Path:
    """`IMAGE` as `docker save` writes it; built again when a file that goes into it has changed.

    Raises:
        Unavailable: it cannot be built on this machine; says why.
    """
    home = cache_folder() / "image"
    archive = home / f"pd-handoff-{_digest()}.tar"
    if archive.exists():
        return archive
    home.mkdir(parents=True, exist_ok=True)
    print("building the image of deploy/docker/Dockerfile: five minutes the first time, one minute later")
    with tempfile.TemporaryDirectory(dir=home, prefix=".building-") as scratch:
        install(Apt(Path(scratch) / "apt"))
        made = _build(Buildah(home / "store"), Path(scratch))
        for older in home.glob("pd-handoff-*.tar"):
            older.unlink()
        return made.rename(archive)


def _build(buildah: Buildah, scratch: Path) -> Path:
    closed = [] if buildah.can_pull(PYTHON_IMAGE) else _instead_of_registries(buildah, scratch)
    dockerfile = f"--file={DOCKERFILE}"
    buildah("build", "--isolation=chroot", "--layers", f"--tag={IMAGE}", *closed, dockerfile, str(ROOT))
    made = scratch / "image.tar"
    buildah("push", "--quiet", IMAGE, f"docker-archive:{made}:{IMAGE}")
    return made


def _instead_of_registries(buildah: Buildah, scratch: Path) -> list[str]:
    """Options of the build: what comes from this machine because the network does not give it."""
    python = build_python_image(buildah, scratch)
    wheels = scratch / "index/torch"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={wheels}"]
    checked([*pip, f"--constraint={ROOT / 'constraints.txt'}", "torch"])
    names = [wheel.name for wheel in wheels.iterdir()]
    (wheels / "index.html").write_text("".join(f'<a href="{name.replace("+", "%2B")}">{name}</a>' for name in names))
    mounted = [f"--volume={path}:{path}:ro" for path in OF_THIS_MACHINE if path.exists()]
    torch = [f"--volume={wheels.parent}:/index:ro", "--build-arg=TORCH_CPU_INDEX=file:///index"]
    return ["--pull-never", f"--build-arg=PYTHON_IMAGE={python}", *mounted, *torch]


def _digest() -> str:
    """Of all that the image is made from in this repository."""
    digest = hashlib.sha256()
    for path in sorted(_files([DOCKERFILE, *(ROOT / each for each in CONTEXT)])):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        found = [place] if place.is_file() else place.rglob("*")
        yield from (path for path in found if path.is_file() and "__pycache__" not in path.parts)


if __name__ == "__main__":
    try:
        print(f"{IMAGE} is in {image_archive()}")
    except Unavailable as why:
        print(f"no image on this machine: {why}")
