"""Entry points of SGLang's server and router processes (see `plasmid_serving.processes.launch`)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plasmid_models.text_model import has_vision

LOADER = "plasmid_sglang.loader.load"
"""Import path of the custom weight loader, which SGLang imports."""
MESSAGE = "plasmid.command"
"""Name of the tensor that carries the engine's message to the loader."""
RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


def serve(arguments: dict[str, Any]) -> None:
    """Run a server until it exits."""
    bind_threads(arguments)
    skip_other_models(arguments)
    store = open_rendezvous(arguments)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**(text_arguments(arguments) | arguments)))
    del store  # keeps the store alive until now


def bind_threads(arguments: Mapping[str, Any]) -> None:
    """On the CPU, let ranks share the cores. SGLang otherwise requires a NUMA node per rank."""
    ranks = arguments.get("tp_size", 1) * arguments.get("pp_size", 1)
    if arguments.get("device") != "cpu" or ranks <= len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))):
        return
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * (ranks // arguments.get("nnodes", 1))))


def text_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that serve only the text model of a folder with a vision model: prompts are text.

    SGLang would otherwise need the folder's processor of images.
    """
    return {"enable_multimodal": False} if has_vision(_read_config(arguments)) else {}


def skip_other_models(arguments: Mapping[str, Any]) -> None:
    """Have SGLang's schedulers import only the modules that offer the model's class, instead of over 200.

    SGLang imports every module of `sglang.srt.models` before it looks up a class. Nothing is skipped if no module
    offers the class (SGLang then uses transformers), or if another class than that of the folder may be needed: with
    speculative decoding, a chosen implementation, a changed config, or quantized weights.
    """
    config = _read_config(arguments)
    chosen = ("speculative_algorithm", "model_impl", "quantization", "json_model_override_args")
    spec = find_spec("sglang")
    names = list(config.get("architectures") or [])
    if spec is None or len(names) != 1 or "quantization_config" in config or any(map(arguments.get, chosen)):
        return
    folder = Path(str(spec.origin)).parent / "srt" / "models"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("[!_]*.py")}
    offers = {name: text[text.rfind("\nEntryClass") :] for name, text in texts.items() if "\nEntryClass" in text}
    needed = {module for module, offer in offers.items() if re.search(rf"\b{re.escape(names[0])}\b", offer)}
    if needed:
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(sorted(texts.keys() - needed)))


def _read_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    path = Path(arguments["model_path"]) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def open_rendezvous(arguments: Mapping[str, Any]) -> Any:
    """Open a rendezvous for SGLang's processes, whose own store would listen on all addresses of the machine.

    On one machine it is an in-memory file of this process. With several machines, the first opens a store that listens
    only on its address in the run. The rendezvous exists as long as the returned object.
    """
    if arguments.get("nnodes", 1) == 1:
        os.environ[RENDEZVOUS] = f"file:///proc/{os.getpid()}/fd/{os.memfd_create('sglang-rendezvous')}"
        return None
    from plasmid_models.sync.rendezvous import listen

    address = urlsplit(f"tcp://{arguments['dist_init_addr']}")
    os.environ |= {RENDEZVOUS: address.geturl(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return listen(str(address.hostname), address.port or 0) if arguments.get("node_rank", 0) == 0 else None


def route(arguments: dict[str, Any]) -> None:
    """Run a router until it exits."""
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs(**arguments))
