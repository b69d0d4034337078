"""A plugin whose trainer kills the control process of Ray (`gcs_server`) at a moment of the start."""

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
    """Starts two processes. Kills once, as the file `killed` says."""

    kind: Literal["killing"] = "killing"
    moment: Literal["before", "while", "after"] = "before"
    """When the control process is killed, as seen from the start of the first process."""
    delay_s: float = 0.0
    """How long after the first process is asked for, if `while`."""
    pid: int = 0
    """Id of the control process; 0 for that of the run's own Ray."""

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
