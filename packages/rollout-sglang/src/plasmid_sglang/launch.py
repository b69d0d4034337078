"""Entry points of SGLang's server and router processes (see `plasmid_serving.processes.launch`)."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plasmid_models.text_model import has_vision
from plasmid_serving.processes.early import start_early
from plasmid_serving.processes.launch import wait_until_allowed

LOADER = "plasmid_sglang.loader.load"
"""Import path of the custom weight loader, which SGLang imports."""
MESSAGE = "plasmid.command"
"""Name of the tensor that carries the engine's message to the loader."""
RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
SCHEDULER = "sglang.srt.managers.scheduler:run_scheduler_process"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager:run_detokenizer_process"
SCHEDULER_IMPORTS = (
    "plasmid_sglang.without_megatron",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.model_executor.model_runner",
)
"""Modules that a scheduler otherwise imports after it has received its arguments. `model_runner` imports the loaders of
weights, but no models."""
READ_BY_IMPORTS = (
    "SGLANG_ENABLE_CUSTOM_ALL_REDUCE_V2_MULTINODE",
    "SGLANG_ENABLE_TORCH_COMPILE",
    "SGLANG_MOE_NVFP4_DISPATCH",
)
"""Environment variables that SGLang (0.5.17 to 0.5.23) may set before it starts schedulers, which read them while
importing. Modules of models are imported later."""


def serve(arguments: dict[str, Any]) -> None:
    """Run a server until it exits."""
    locate_title()
    bind_threads(arguments)
    skip_other_models(arguments)
    store = open_rendezvous(arguments)
    start_processes_early(arguments)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**(text_arguments(arguments) | arguments)))
    del store  # keeps the store alive until now


def locate_title() -> None:
    """Let forks of this process change their title, by which stacks and reports of hangs name them.

    setproctitle looks for the memory of the title at its first call, and does not find it if the process has set
    environment variables before. That call names this process by its whole command, which is undone.
    """
    with suppress(ImportError):
        import setproctitle

        file = Path("/proc/self/comm")
        name = file.read_text().removesuffix("\n")
        setproctitle.getproctitle()
        file.write_text(name)


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


def start_processes_early(arguments: Mapping[str, Any]) -> None:
    """Start this machine's schedulers and the detokenizer now: their imports take as long as those of the server.

    SGLang itself starts them after its imports. With several data parallel ranks, it starts the schedulers in another
    process. Schedulers measure the free GPU memory once they have their arguments.

    On the CPU with ``OMP_NUM_THREADS=1``, they are forked after one import of their modules: the imports of three
    processes need three cores to take as long as one. With more threads, which an import starts, or on a GPU, where an
    import may initialize CUDA, forks are not possible.
    """
    if arguments.get("dp_size", 1) != 1:
        wait_until_allowed()
        return
    # as SGLang sets them before it starts schedulers
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    os.environ["SGLANG_ENABLE_TORCH_COMPILE"] = str(int(arguments.get("enable_torch_compile", False)))
    ranks = arguments.get("tp_size", 1) * arguments.get("pp_size", 1) // arguments.get("nnodes", 1)
    has_one_thread = arguments.get("device") == "cpu" and os.environ.get("OMP_NUM_THREADS") == "1"
    with ExitStack() as stack:
        if arguments.get("enable_memory_saver"):
            from torch_memory_saver import configure_subprocess  # makes schedulers preload a library

            stack.enter_context(configure_subprocess())
        start_early(
            *[SCHEDULER] * ranks,
            imports=SCHEDULER_IMPORTS,
            read_by_imports=READ_BY_IMPORTS,
            before_task=wait_until_allowed,
            fork=has_one_thread and not arguments.get("enable_memory_saver"),
        )
    if arguments.get("node_rank", 0) == 0:
        start_early(DETOKENIZER, read_by_imports=READ_BY_IMPORTS, fork=has_one_thread)


def route(arguments: dict[str, Any]) -> None:
    """Run a router until it exits.

    `sglang_router` imports SGLang, and with it torch, only to trace its load balancer in Python, and does without if it
    is not installed. The import would take 6 CPU seconds and over 1 GB.
    """
    if not arguments.get("mini_lb"):
        sys.modules.setdefault("sglang", None)  # type: ignore[arg-type]
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs(**arguments))
