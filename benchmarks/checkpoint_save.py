"""Measure how much time hashing adds to saving a checkpoint, with files of the same size.

    python benchmarks/checkpoint_save.py --gb 2 --out benchmarks/results/checkpoint-save-cpu.json

Each round writes files from memory to a new folder, hashes them for the manifest (`write_manifest`) and syncs the
folder (`sync_tree`), in the order of `CheckpointFolder.commit`. In a run, writing is faster with several ranks and
slower from a GPU; the driver hashes all files, from the page cache.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from plasmid.utils.safe_files import sync_tree
from plasmid_models.manifest import write_manifest

PIECE_BYTES = 64 << 20


def save(folder, num_files, num_bytes, piece):
    """Write one checkpoint and return the seconds of each part."""
    began = time.monotonic()
    for number in range(num_files):
        with (folder / f"__{number}_0.distcp").open("wb") as file:
            for start in range(0, num_bytes // num_files, len(piece)):
                file.write(piece[: num_bytes // num_files - start])
    written, computed = time.monotonic(), time.process_time()
    write_manifest(folder)
    hashed, computed = time.monotonic(), time.process_time() - computed
    sync_tree(folder)
    synced = time.monotonic()
    return {"write_s": written - began, "hash_s": hashed - written, "hash_cpu_s": computed, "sync_s": synced - hashed}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="size of a checkpoint, in GB")
    parser.add_argument("--files", type=int, default=2, help="number of files: one per trainer rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="where to write, on the disk to measure; by default a temporary folder"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    num_bytes, piece, rounds = int(args.gb * 1e9), memoryview(random.Random(0).randbytes(PIECE_BYTES)), []
    for _ in range(args.rounds):
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-save-", dir=args.folder))
        load = os.getloadavg()[0]
        try:
            if shutil.disk_usage(folder).free < 2 * num_bytes:
                raise SystemExit(f"{folder}: needs {2 * args.gb:g} GB of free space; give another --folder")
            parts = save(folder, args.files, num_bytes, piece)
        finally:
            shutil.rmtree(folder)
        hashing = parts["hash_s"] / (parts["write_s"] + parts["sync_s"])
        rounds.append(
            {"load": round(load, 1), **{k: round(s, 3) for k, s in parts.items()}, "share": round(hashing, 3)}
        )
        print(json.dumps(rounds[-1]), flush=True)
    found = {
        "command": f"python benchmarks/checkpoint_save.py --gb {args.gb:g} --files {args.files} --rounds {args.rounds}",
        "device": f"CPU, {os.cpu_count()} cores",
        "hashing_adds": "share: seconds of hashing over seconds of writing and syncing",
        "median_share": statistics.median(one["share"] for one in rounds),
        "rounds": rounds,
    }
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
