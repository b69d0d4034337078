"""Measure SGLang's own weight update for the same tensors: a broadcast without checksums or gathering.

`POST /update_weights_from_distributed`, one call per bucket in SGLang's format "flattened_bucket", while rank 0 of the
group broadcasts the prepared bytes. Timed from the first call to the last response.
"""

import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import requests
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from plasmid_models.sync import make_buckets
from plasmid_serving.processes.server import find_free_port
from safetensors.torch import load_file

ROUNDS = 7
LIMIT_S = 60
GROUP = "benchmark"


def own_update_ms(url, key, folder, *, sizes, device, has_sessions):
    """Return the medians by bucket size for the weights in a folder; the server must have one process and be idle.

    With sessions (0.5.23) an update is enclosed by two more calls, which are not timed.
    """
    with tempfile.TemporaryDirectory() as answers:
        answer = Path(answers, "ms.json")
        mp.spawn(_send, args=(url, key, folder, list(sizes), device, has_sessions, answer), nprocs=1)
        return {int(size): ms for size, ms in json.loads(answer.read_text()).items()}


def _send(_, url, key, folder, sizes, device, has_sessions, answer):
    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as in SGLang
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {key}"

    def post(path, body):
        response = session.post(f"{url}{path}", json=body, timeout=LIMIT_S)
        if not response.ok or not response.json()["success"]:
            raise RuntimeError(f"{path}: {response.text}")

    group = _join(post, "nccl" if device == "cuda" else "gloo")
    files = sorted(Path(folder).glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file, device=device).items()}
    found = {}
    if has_sessions:
        post("/begin_weight_update", {})
    with ThreadPoolExecutor() as pool:
        for size in sizes:
            buckets = [_flat(bucket, tensors) for bucket in make_buckets(tensors.items(), bucket_bytes=size)]
            times = [_update(pool, post, group, buckets) for _ in range(ROUNDS + 2)]
            found[size] = 1000 * statistics.median(times[2:])
    if has_sessions:
        post("/end_weight_update", {})
    answer.write_text(json.dumps(found))
    post("/destroy_weights_update_group", {"group_name": GROUP})


def _join(post, backend):
    """Join a process group with the server, as rank 0."""
    from sglang.srt.utils.common import init_custom_process_group

    host = "127.0.0.1"
    port = find_free_port(host)
    meeting = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": 2}
    request = meeting | {"group_name": GROUP, "backend": backend}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(post, "/init_weights_update_group", request)
        group = init_custom_process_group(
            backend=backend,
            init_method=f"tcp://{host}:{port}",
            timeout=timedelta(seconds=LIMIT_S),
            world_size=2,
            rank=0,
            group_name=GROUP,
        )
        asked.result()
    return group


def _flat(bucket, tensors):
    """Return the request for a bucket, and its concatenated bytes."""
    about = {"names": bucket.names, "shapes": bucket.shapes, "dtypes": bucket.dtypes}
    flat = torch.cat([tensors[name].flatten().view(torch.uint8) for name in bucket.names])
    return about | {"group_name": GROUP, "load_format": "flattened_bucket", "flush_cache": False}, flat


def _update(pool, post, group, buckets):
    """Run one update; return its seconds."""
    began = time.perf_counter()
    for request, flat in buckets:
        asked = pool.submit(post, "/update_weights_from_distributed", request)
        dist.broadcast(flat, src=0, group=group)
        asked.result()
    return time.perf_counter() - began
