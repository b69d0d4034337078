"""Daemons of a run's own Ray, and their process groups."""

import json
import os
import subprocess
import sys

import pytest

DRIVER = """
import asyncio, json, os
from pathlib import Path
import psutil
from plasmid.config.placement import PlacementConfig
from plasmid_runtime.cluster.opening import EarlyRay, open_cluster

early = EarlyRay(PlacementConfig(address="local"))
early.start()

async def main():
    cluster = open_cluster(log_dir=Path("logs"), started=early.take())
    children = psutil.Process().children()
    print(json.dumps([os.getpgrp(), {child.name(): os.getpgid(child.pid) for child in children}]))
    assert cluster.num_gpus >= 0
    names = sorted(child.name() for child in children if "ray_watch.py" not in " ".join(child.cmdline()))
    assert names == ["gcs_server", "raylet"], names
    await cluster.close()
    assert not psutil.Process().children()

asyncio.run(main())
"""


@pytest.mark.long
def test_daemons_have_process_groups_of_their_own_and_end_with_the_cluster(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run([sys.executable, "-c", DRIVER], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    own, groups = json.loads(ran.stdout.splitlines()[-1])
    assert {"gcs_server", "raylet"} <= set(groups)
    assert own not in groups.values(), groups
