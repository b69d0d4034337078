"""vLLM engines in this process's cluster; their servers run in a separate environment."""

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from plasmid.components import BuildContext
from plasmid.config.load import resolve
from plasmid.protocols import Bundle
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_serving.engine import ServersEngine
from plasmid_serving.start import start_servers
from plasmid_serving.supervisor import Condition
from plasmid_vllm.dialect import make_dialect

from tests.engine_cases import plain_model, publish

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PLASMID_TEST_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
START_S = 900


def make_config(model_path, *, ranks=1, sampling=None, trainer="no-trainer", **settings):
    """Create a recipe that trains nothing."""
    rollout = {"kind": "vllm", "python": str(PYTHON), "dtype": "float32", "health_timeout_s": 60.0, **settings}
    rollout["server_args"] = {"kv_cache_memory_bytes": 64 << 20} | dict(settings.get("server_args", {}))
    return resolve(
        {
            "model": {"path": str(model_path)},
            "data": {"path": "none.jsonl"},
            "trainer": {"kind": trainer},
            "algorithm": {"kind": "grpo"},
            "rewards": [{"kind": "no-reward"}],
            "rollout": rollout,
            "sampling": {"stop": ["<user>"], **(sampling or {})},
            "placement": {"device": "cpu", "engine_ranks": ranks, "start_timeout_s": START_S},
            "run": {"sync_timeout_s": 240},
            "plugins": [str(ROOT / "tests" / "no_training_plugin.py")],
        }
    )


def make_context(model_path, run_dir, *, ranks=1, **settings):
    """Return the context for building an engine on this machine's CPU."""
    config = make_config(model_path, ranks=ranks, **settings)
    bundles = (Bundle(),) * ranks
    return BuildContext(cluster=LocalCluster(), config=config, run_dir=Path(run_dir), bundles=bundles, threads=1)


class Shared:
    """One server for many tests; each test uses it through an engine with its own settings."""

    def __init__(self, model_path, run_dir):
        self.model_path = model_path
        self.run_dir = run_dir
        self._runner = asyncio.Runner()
        self._context = make_context(model_path, run_dir)
        settings = self._context.config.rollout
        self._servers = self.run(start_servers(settings, self._context, make_dialect))
        self._count = 0

    def run(self, work):
        """Run a coroutine on the event loop that owns the connections to the server."""
        return self._runner.run(work)

    @contextlib.asynccontextmanager
    async def engine(self, *, adapter=None, **settings):
        """Return an engine on the server, with the model's own weights as version 0, and their ``adapter``."""
        self._count += 1
        context = make_context(self.model_path, self.run_dir / str(self._count), **settings)
        context = replace(context, cluster=self._context.cluster)
        servers = [replace(server, condition=Condition.SERVING) for server in self._servers]
        settings = context.config.rollout
        engine = ServersEngine(servers, settings, context, make_dialect(settings, context))
        try:
            await engine.pause("abort")
            weights = plain_model(self.model_path).named_parameters()
            await publish(engine, [*(adapter or {}).items(), *weights], 0)
            await engine.resume()
            yield engine
        finally:
            await engine.pause("abort")
            await engine.client.disconnect()
            await engine.supervisor.stop()

    def close(self):
        """End the server."""
        for server in self._servers:
            self.run(server.connection.api.close())
        self.run(asyncio.wait_for(self._context.cluster.close(), 60))
        self._runner.close()
