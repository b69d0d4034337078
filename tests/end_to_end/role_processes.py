"""Runs whose dedicated ranks of roles are forked processes, because Ray's take several seconds to import modules."""

from plasmid_runtime.cluster.local import LocalCluster

from tests.backend_fsdp.fsdp_processes import ProcessCluster


class RolesInProcesses(LocalCluster):
    """Starts the ranks of roles in separate processes, and everything else in threads of this process."""

    def __init__(self, processes):
        super().__init__()
        self.processes = ProcessCluster(processes)

    async def start(self, factory, /, *args, name, **options):
        cluster = self.processes if name in ("reference-0", "critic-0", "teacher-0") else super()
        return await cluster.start(factory, *args, name=name, **options)
