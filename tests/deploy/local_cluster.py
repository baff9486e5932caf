"""A release of the chart on this machine: its pods as processes, and the Services and Deployments around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.deploy.pods import Node, Pod
from tests.deploy.rendered import Object, Template, of_kind, templates


class Cluster:
    """The pods that run, and the services that lead to them."""

    def __init__(self, node: Node, objects: Sequence[Object], pods: asyncio.TaskGroup) -> None:
        self.pods: list[Pod] = []
        self._node = node
        self._objects = objects
        self._tasks = pods
        self._running: list[asyncio.Task[None]] = []

    def of(self, role: str) -> list[Pod]:
        """Those that run, the oldest first."""
        return [pod for pod in self.pods if pod.template.role == role and not pod.ended.is_set()]

    async def install(self) -> None:
        """All pods, ready."""
        self._node.keep(of_kind(self._objects, "Secret"))
        await self.add(templates(self._objects))

    async def add(self, new: Sequence[Template]) -> list[Pod]:
        """Pods of whatever kind, ready."""
        pods = [self._start(template) for template in new]
        for pod in pods:
            await pod.until_ready()
        return pods

    async def upgrade(self, objects: Sequence[Object], *roles: str) -> float:
        """Replaces these roles' pods one after the other, as their Deployment says; gives the longest drain."""
        self._objects = objects
        self._node.keep(of_kind(objects, "Secret"))
        async with asyncio.TaskGroup() as ends:
            drains = [
                await self._replace(old, new, ends)
                for role in roles
                for old, new in zip(self.of(role), _of_role(objects, role), strict=True)
            ]
        return max(drain.result() for drain in drains)

    async def test(self) -> str:
        """What `helm test` runs; its output. Fails as it does."""
        (template,) = templates(self._objects, "Pod")
        pod = Pod(template, self._node, lambda: None)
        pod.know(self._names())
        return await pod.run_once()

    def service(self, name: str) -> list[str]:
        """Addresses that a service leads to now; of those without readiness all that run."""
        (service,) = (each for each in of_kind(self._objects, "Service") if each["metadata"]["name"] == name)
        wanted = service["spec"]["selector"].items()
        return [
            pod.address
            for pod in self.pods
            if wanted <= pod.template.labels.items()
            and not pod.ended.is_set()
            and (service["spec"].get("publishNotReadyAddresses") or pod.is_serving)
        ]

    def close(self) -> None:
        """Kills all that still run."""
        for task in self._running:
            task.cancel()

    async def _replace(self, old: Pod, new: Template, ends: asyncio.TaskGroup) -> asyncio.Task[float]:
        if new.surges:
            await self.add([new])
        end = ends.create_task(old.terminate())
        if not new.surges:
            await end
            await self.add([new])
        return end

    def _start(self, template: Template) -> Pod:
        pod = Pod(template, self._node, self._tell)
        self.pods.append(pod)
        self._tell()
        self._running.append(self._tasks.create_task(pod.run(), name=str(pod)))
        return pod

    def _tell(self) -> None:
        """DNS, everywhere."""
        names = self._names()
        for pod in self.pods:
            pod.know(names)

    def _names(self) -> list[tuple[str, str]]:
        services = [service["metadata"]["name"] for service in of_kind(self._objects, "Service")]
        running = [pod for pod in self.pods if not pod.ended.is_set()]
        own = [(pod.address, pod.template.host_name) for pod in running if pod.template.host_name is not None]
        return [(address, name) for name in services for address in self.service(name)] + own


@asynccontextmanager
async def installed(node: Node, objects: Sequence[Object]) -> AsyncIterator[Cluster]:
    """All pods, ready; they are killed in the end. A pod that dies fails the block at once."""
    async with asyncio.TaskGroup() as pods:
        cluster = Cluster(node, objects, pods)
        try:
            await cluster.install()
            yield cluster
        finally:
            cluster.close()


def _of_role(objects: Sequence[Object], role: str) -> list[Template]:
    return [template for template in templates(objects) if template.role == role]
