"""A plugin whose trainer kills Ray's control process (`gcs_server`) at a chosen moment of the start."""

import subprocess
from pathlib import Path
from typing import Literal

import psutil
from plasmid import TrainerConfig, hookimpl
from plasmid.protocols import Resources
from plasmid.testing.fakes import FakeTrainer


class Rank:
    """A process of the trainer."""


class Killing(TrainerConfig):
    """Starts two processes, and kills the control process once; the file `killed` records it."""

    kind: Literal["killing"] = "killing"
    moment: Literal["before", "while", "after"] = "before"
    """When the control process is killed, relative to the start of the first process."""
    delay_s: float = 0.0
    """Delay after requesting the first process, in seconds, if `while`."""
    pid: int = 0
    """Process id of the control process; 0 for that of the run's own Ray."""

    async def build(self, context):
        moment = None if Path("killed").exists() else self.moment
        Path("killed").touch()
        if moment == "before":
            self._kill()
        elif moment == "while":
            subprocess.Popen(["/bin/sh", "-c", f"sleep {self.delay_s}; kill -9 {self._control().pid}"])
        for rank in range(2):
            await context.cluster.start(Rank, name=f"trainer-{rank}", resources=Resources())
            if moment == "after" and rank == 0:
                self._kill()
        return FakeTrainer()

    def _control(self) -> psutil.Process:
        if self.pid:
            return psutil.Process(self.pid)
        (control,) = (one for one in psutil.Process().children() if one.name() == "gcs_server")
        return control

    def _kill(self) -> None:
        control = self._control()
        control.kill()
        while control.is_running() and control.status() != psutil.STATUS_ZOMBIE:
            pass


@hookimpl
def register_components():
    return [Killing]
