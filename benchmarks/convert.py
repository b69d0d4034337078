"""Compare `rl convert` from Hugging Face to torch_dist and back with plain copying of the same files.

    python benchmarks/random_qwen3.py 30b-a3b models/qwen3-30b-a3b-1-layer --layers 1 --dtype bfloat16
    python benchmarks/convert.py models/qwen3-30b-a3b-1-layer --out benchmarks/results/convert-cpu.json

Each round copies the weight files in pieces of 16 MiB and syncs the copies, and runs `rl convert` in both directions
with each number of processes. Before each measurement the source is dropped from the page cache. The seconds of a
conversion include the start of the command, which is also measured separately (`--help`).

With ``--consume`` there is one round with one number of processes, and MODEL and the converted folder are removed as
soon as they have been converted, so that the disk needs room for two folders instead of three; weights are then
compared by hashes. If ``--folder`` is on another disk than MODEL, it only needs room for one folder, because the
converted one is moved to the disk of MODEL before the way back, and copied from there once more. With MODEL in
memory, this measures the writing:

    python benchmarks/random_qwen3.py 30b-a3b /dev/shm/qwen3-30b-a3b --dtype bfloat16 --device cuda
    python benchmarks/convert.py /dev/shm/qwen3-30b-a3b --consume --workers 8 --part-gb 4 --folder .
"""

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from plasmid.utils.safe_files import sync_tree

PIECE_BYTES = 16 << 20
COPY_BACK = "copy before the way back"


def drop_from_cache(folder):
    """Drop the files from the page cache, so that they are read from the disk next time."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source, target):
    """Copy the files through user space and sync them: the kernel's copy functions could share blocks instead."""
    target.mkdir()
    for path in (path for path in source.iterdir() if path.is_file()):
        with path.open("rb") as read, (target / path.name).open("wb") as written:
            shutil.copyfileobj(read, written, PIECE_BYTES)
    sync_tree(target)


def rl(*arguments):
    """Run `rl` with these arguments."""
    subprocess.run([sys.executable, "-m", "plasmid_cli", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def measure(action, source):
    """Return the seconds of an action that reads the folder ``source``, and the load average before it."""
    drop_from_cache(source)
    load, began = os.getloadavg()[0], time.monotonic()
    action()
    return {"seconds": round(time.monotonic() - began, 1), "load": round(load, 1)}


def measure_round(model, folder, workers, part_gb):
    """Measure copying and both directions once."""
    found = {"start of rl convert": measure(lambda: rl("convert", "--help"), model)}
    found["copy"] = measure(lambda: copy(model, folder / "copy"), model)
    shutil.rmtree(folder / "copy")
    for count in workers:
        there, back, given = folder / "there", folder / "back", ("--workers", count)
        forth = ("convert", model, there, "--to", "torch_dist", f"to.max_file_gb={part_gb:g}", *given)
        found[f"hf to torch_dist, {count} processes"] = measure(functools.partial(rl, *forth), model)
        home = ("convert", there, back, f"to.max_shard_gb={part_gb:g}", *given)
        found[f"torch_dist to hf, {count} processes"] = measure(functools.partial(rl, *home), there)
        shutil.rmtree(there)
        if count == workers[-1]:
            rl("convert", "--check", model, back)
        shutil.rmtree(back)
    return found


def hash_tensors(path, names):
    """Return the SHA-256 of the bytes of these tensors of a safetensors file, by name."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {n: hashlib.sha256(file.get_tensor(n).contiguous().view(torch.uint8).numpy()).hexdigest() for n in names}


def hash_folder(folder):
    """Return the SHA-256 of each tensor of a folder, by name."""
    from safetensors import safe_open

    parts = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        parts += [(path, names[i :: os.cpu_count()]) for i in range(os.cpu_count())]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("forkserver")) as pool:
        found = list(pool.map(hash_tensors, *zip(*parts, strict=True)))
    return {name: value for part in found for name, value in part.items()}


def consume(model, folder, workers, part_gb):
    """Measure copying and both directions once, and remove each folder after its conversion."""
    there, back, given = folder / "there", folder / "back", ("--workers", workers)
    found = {"start of rl convert": measure(lambda: rl("convert", "--help"), model)}
    found["copy"] = measure(lambda: copy(model, folder / "copy"), model)
    shutil.rmtree(folder / "copy")
    print(json.dumps(found), flush=True)
    forth = ("convert", model, there, "--to", "torch_dist", f"to.max_file_gb={part_gb:g}", *given)
    found[f"hf to torch_dist, {workers} processes"] = measure(functools.partial(rl, *forth), model)
    print(json.dumps(found), flush=True)
    before = hash_folder(model)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=model.parent) as beside:
        shutil.rmtree(model)
        if model.parent.stat().st_dev != folder.stat().st_dev:
            there = Path(shutil.move(there, beside))
            found[COPY_BACK] = measure(lambda: copy(there, folder / "copy"), there)
            shutil.rmtree(folder / "copy")
        home = ("convert", there, back, f"to.max_shard_gb={part_gb:g}", *given)
        found[f"torch_dist to hf, {workers} processes"] = measure(functools.partial(rl, *home), there)
        print(json.dumps(found), flush=True)
        shutil.rmtree(there)
    if hash_folder(back) != before:
        raise SystemExit(f"{back}: the weights are not those of {model}")
    return found


def copy_of(name, found):
    """Return the seconds of the copy to which a measurement is compared."""
    back = COPY_BACK in found and name.startswith("torch_dist")
    return found[COPY_BACK if back else "copy"]["seconds"]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write, on the disk to measure")
    parser.add_argument("--part-gb", type=float, default=0.7, help="size of the files that are written")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--consume", action="store_true", help="remove MODEL, and compare weights by hashes")
    args = parser.parse_args(argv)
    num_bytes = sum(path.stat().st_size for path in args.model.glob("*.safetensors"))
    rounds = []
    for _ in range(1 if args.consume else args.rounds):
        with tempfile.TemporaryDirectory(prefix="convert-", dir=args.folder) as folder:
            if args.consume:
                rounds.append(consume(args.model, Path(folder), args.workers[0], args.part_gb))
            else:
                rounds.append(measure_round(args.model, Path(folder), args.workers, args.part_gb))
        print(json.dumps(rounds[-1], indent=1), flush=True)
    seconds = {name: statistics.median(found[name]["seconds"] for found in rounds) for name in rounds[0]}
    ratios = {n: statistics.median(found[n]["seconds"] / copy_of(n, found) for found in rounds) for n in seconds}
    result = {
        "command": "python benchmarks/convert.py " + " ".join(sys.argv[1:] if argv is None else argv),
        "device": f"CPU, {os.cpu_count()} cores",
        "gb": round(num_bytes / 1e9, 2),
        "median_gb_per_s": {n: round(num_bytes / 1e9 / s, 3) for n, s in seconds.items() if not n.startswith("start")},
        "median_of_seconds_over_copy_in_the_same_round": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "rounds": rounds,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
