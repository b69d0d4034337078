"""SGLang engines in this process's cluster, requests, and the results of plain transformers."""

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

from plasmid.components import BuildContext
from plasmid.config.load import resolve
from plasmid.protocols import Bundle
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_serving.engine import ServersEngine
from plasmid_serving.start import start_servers
from plasmid_serving.supervisor import Condition
from plasmid_sglang.dialect import make_dialect

from tests.engine_cases import (  # noqa: F401  the tests of this folder take them from here
    changed,
    make_request,
    plain_distributions,
    plain_logprobs,
    plain_model,
    publish,
)

HERE = Path(__file__).parent
START_S = 600
KEY = "PLASMID_TEST_SERVER_KEY"


def make_context(model_path, run_dir, *, ranks=1, stop=("<user>",), plugins=(), trainer="no-trainer", **settings):
    """Return the context for building an engine on this machine's CPU."""
    rollout = {"kind": "sglang", "dtype": "float32", "health_interval_s": 1.0, "health_timeout_s": 60.0, **settings}
    if rollout.get("server_args", {}) is not None:
        rollout["server_args"] = {"max_total_tokens": 4096} | dict(settings.get("server_args", {}))
    rollout = {name: value for name, value in rollout.items() if value is not None}
    config = resolve(
        {
            "model": {"path": str(model_path)},
            "data": {"path": "none.jsonl"},
            "trainer": {"kind": trainer},
            "algorithm": {"kind": "grpo"},
            "rewards": [{"kind": "no-reward"}],
            "rollout": rollout,
            "sampling": {"stop": list(stop)},
            "placement": {"device": "cpu", "engine_ranks": ranks, "start_timeout_s": START_S},
            "run": {"sync_timeout_s": 240},
            "plugins": [str(HERE.parent / "no_training_plugin.py")],
        }
    )
    bundles = (Bundle(),) * ranks
    return BuildContext(cluster=LocalCluster(), config=config, run_dir=Path(run_dir), bundles=bundles, threads=1)


@contextlib.asynccontextmanager
async def started(model_path, run_dir, **settings):
    """Start an engine with its own servers."""
    context = make_context(model_path, run_dir, **settings)
    engine = None
    try:
        engine = await context.config.rollout.build(context)
        yield engine
    finally:
        if engine is not None:
            await engine.close()
        await context.cluster.close()


class Shared:
    """One server for many tests; each test uses it through an engine with its own settings."""

    def __init__(self, model_path, run_dir):
        self.model_path = model_path
        self.run_dir = run_dir
        self._runner = asyncio.Runner()
        self._context = make_context(model_path, run_dir)
        settings = self._context.config.rollout
        # SGLang compiles penalties and samplers on first use, which takes most of a minute of CPU time
        with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
            self._servers = self.run(start_servers(settings, self._context, make_dialect))
        self._count = 0

    def as_external(self, engine):
        """Return the settings with which a run attaches to the server, which requires its key."""
        api = engine.supervisor.all[0].connection.api
        os.environ[KEY] = api.key
        return {"urls": [api.url], "api_key_env": KEY, "read_back_every": 0}

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
            weights = list(plain_model(self.model_path).named_parameters())
            await engine.pause("abort")
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
