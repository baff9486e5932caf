"""A real Kubernetes of one node for tests, in namespaces of its own; nothing of it is left afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster.build import Programs, programs
from tests.cluster.pause import pause_archive
from tests.cluster.settings import Layout, control_groups
from tests.deploy.tools import Unavailable, cache_folder, helm, kubectl

ROOT = Path(__file__).parents[2]
NAMESPACES = ("--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child=SIGKILL", "--mount-proc")
READY_WITHIN_S = 120.0
COMMAND_S = 600.0


class Kube:
    """The cluster while it runs."""

    def __init__(self, layout: Layout, process: subprocess.Popen[str]) -> None:
        self.layout = layout
        self._process = process
        self._environment = os.environ | {"KUBECONFIG": str(layout.kubeconfig), "HOME": str(layout.folder)}

    def kubectl(self, *arguments: str) -> str:
        return self.run(str(kubectl()), *arguments)

    def helm(self, *arguments: str) -> str:
        """A failure is told with what the cluster says of it."""
        try:
            return self.run(str(helm()), *arguments)
        except AssertionError as failed:
            raise AssertionError(f"{failed}\n{self.kubectl('get', 'pods,events')}") from failed

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def run(self, *command: str) -> str:
        """Its output, from the node's network. A failure is told with all that it said."""
        done = subprocess.run(
            self.inside(*command),
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert not done.returncode, f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        """As `run`, left running; its standard input is ours to close."""
        return subprocess.Popen(
            self.inside(*command),
            env=self._environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._process.pid}/ns/net", *command]

    def wait_ready(self) -> None:
        """The node takes pods, and a namespace has the account that they need."""
        eventually(self._not_ready, READY_WITHIN_S)

    def _not_ready(self) -> str:
        if self._process.poll() is not None:
            raise AssertionError(f"the node has ended: {self._process.stdout and self._process.stdout.read()}")
        if not self.layout.kubeconfig.exists():
            return "the node has not come up yet"
        try:
            self.kubectl("wait", "--for=condition=Ready", "node/node", "--timeout=5s")
            self.kubectl("get", "serviceaccount/default")
        except AssertionError as not_yet:
            return str(not_yet)
        return ""


@contextmanager
def running_kube(images: Sequence[Path]) -> Iterator[Kube]:
    """With these images (docker or OCI archives) in it, ready for pods."""
    built = programs()
    home = cache_folder()
    with _only_one(home) as lock:
        layout = _fresh(home, built, images)
        process = subprocess.Popen(
            ["unshare", *NAMESPACES, sys.executable, "-m", "tests.cluster.node", str(layout.folder)],
            env=os.environ | {"PATH": built.path},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[lock],
            start_new_session=True,
        )
        try:
            kube = Kube(layout, process)
            kube.wait_ready()
            yield kube
        finally:
            process.communicate()  # it ends when its standard input does
            _forget(layout)


def eventually(complaint: Callable[[], str], patience_s: float) -> None:
    """Asks again and again until there is nothing to complain of; fails with the last complaint."""
    give_up = time.monotonic() + patience_s
    while text := complaint():
        assert time.monotonic() < give_up, text
        time.sleep(0.2)


@contextmanager
def _only_one(home: Path) -> Iterator[int]:
    """The node holds the lock too, so whoever gets it knows that the last one has gone."""
    with (home / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            raise Unavailable(f"another cluster is running: {file.name} is locked") from held
        yield file.fileno()


def _fresh(home: Path, built: Programs, images: Sequence[Path]) -> Layout:
    layout = Layout(home / "running")
    _forget(layout)
    layout.logs.mkdir(parents=True)
    layout.cni_plugins.symlink_to(built.cni_plugins)
    pause = pause_archive(built.kubernetes / "pause", layout.folder / "pause.tar")
    layout.images.write_text("\n".join(str(image) for image in [pause, *images]))
    return layout


def _forget(layout: Layout) -> None:
    """What outlives the namespaces: files, and empty control groups. Once more does no harm."""
    for group in control_groups():
        for folder, _, _ in os.walk(group, topdown=False):
            Path(folder).rmdir()
    with suppress(FileNotFoundError):
        shutil.rmtree(layout.folder)
