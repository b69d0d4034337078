"""Checks of the machine: Python, driver, shared memory, disk, ports, Ray and NCCL's variables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    level: Level
    """``error`` if it makes a run fail, ``warning`` if it may make a run slow or fail."""
    what: str
    """Subject of the check."""
    text: str
    """Result."""
    fix: str = ""
    """Suggested fix; empty if none is needed."""


MIN_SHARED_MEMORY = 1 << 30
MIN_DISK, ENOUGH_DISK = 2 << 30, 20 << 30
GLIBC_OF_SGLANG = (2, 34)
DRIVERS = {13: 580, 12: 525}
"""Minimum driver for each major version of CUDA (https://docs.nvidia.com/deploy/cuda-compatibility)."""
SLOWING = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def check_host(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Run all checks that need no package."""
    yield from check_python()
    yield from check_shared_memory(shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0)
    yield from check_disk(environment)
    yield from check_ports()
    yield from check_ray(environment)
    yield from check_nccl(environment, [name for _, name in socket.if_nameindex()])


def check_python() -> Iterator[Finding]:
    """Check the interpreter and the C library, which GPU wheels depend on."""
    name, version = platform.libc_ver()
    text = f"{platform.python_version()}, {name or 'an unknown C library'} {version}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if name == "glibc" and numbers < GLIBC_OF_SGLANG:
        yield Finding("warning", "python", text, "SGLang's kernels need glibc 2.34: use a newer system or a container")
    else:
        yield Finding("ok", "python", text)


def check_shared_memory(size: int) -> Iterator[Finding]:
    """Check ``/dev/shm``, which Ray and NCCL use to transfer data between processes. ``size`` is in bytes."""
    text = f"{size / (1 << 30):.1f} GiB in /dev/shm"
    fix = (
        ""
        if size >= MIN_SHARED_MEMORY
        else "give the container more shared memory: docker run --shm-size=16g, or --ipc=host"
    )
    yield Finding("warning" if fix else "ok", "shared memory", text, fix)


def check_disk(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the disks of runs, models and temporary files."""
    cache = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    places = {"runs": Path.cwd(), "models": Path(cache).expanduser(), "temporary files": Path(tempfile.gettempdir())}
    for what, place in places.items():
        there = next(folder for folder in (place, *place.parents) if folder.is_dir())
        free = shutil.disk_usage(there).free
        text = f"{free / (1 << 30):.1f} GiB free for {what}, in {place}"
        if not os.access(there, os.W_OK):
            yield Finding("error", "disk", f"{place} is not writable", "change its owner, or use another folder")
        elif free < ENOUGH_DISK:
            fix = {"runs": "run.dir", "models": "HF_HOME", "temporary files": "TMPDIR"}[what]
            yield Finding(
                "error" if free < MIN_DISK else "warning", "disk", text, f"free space, or set {fix} to a larger disk"
            )
        else:
            yield Finding("ok", "disk", text)


def check_ports() -> Iterator[Finding]:
    """Check that processes on this machine can connect to each other by host name and by the loopback address."""
    for host in ("127.0.0.1", socket.gethostname()):
        try:
            with socket.create_server((host, 0)) as server:
                address = server.getsockname()[:2]
                with socket.create_connection(address, timeout=5):
                    yield Finding("ok", "ports", f"processes can connect through {host} ({address[0]})")
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 characters
            what = (getattr(error, "strerror", None) or str(error)).lower()
            fix = f"add the machine's address for {host} to /etc/hosts, or open the firewall between local processes"
            yield Finding("error", "ports", f"{host}: {what}", fix)


def check_ray(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the cluster that a run would join."""
    address = environment.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not address or address in ("auto", "local"):
        yield Finding("ok", "ray", "a run starts its own cluster, unless placement.address is set")
    elif not (host and port.isdigit()):
        yield Finding(
            "error", "ray", f"RAY_ADDRESS={address}", "set it to host:port of the cluster's head, or unset it"
        )
    else:
        try:
            with socket.create_connection((host, int(port)), timeout=5):
                yield Finding("ok", "ray", f"RAY_ADDRESS={address} answers")
        except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: a label of more than 63 characters
            yield Finding(
                "error", "ray", f"RAY_ADDRESS={address}: {error}", "start Ray there (ray start --head), or unset it"
            )
    if environment.get("RAY_AUTH_MODE") == "disabled":
        yield Finding(
            "warning", "ray", "RAY_AUTH_MODE=disabled: anyone who can reach a joined cluster can run code", "unset it"
        )


def check_nccl(environment: Mapping[str, str], interfaces: list[str]) -> Iterator[Finding]:
    """Check environment variables that affect communication between GPUs."""
    found = {name: value for name, value in sorted(environment.items()) if name.startswith("NCCL_")}
    shown = ", ".join(f"{name}={value}" for name, value in found.items())
    bad = [name for name, value in SLOWING.items() if found.get(name) == value]
    if bad:
        yield Finding(
            "warning", "nccl", f"{', '.join(bad)} slows down communication between GPUs", f"unset {' '.join(bad)}"
        )
    names = [name.lstrip("^=") for name in found.get("NCCL_SOCKET_IFNAME", "").split(",") if name]
    excluded = found.get("NCCL_SOCKET_IFNAME", "").startswith("^")
    if names and not excluded and not any(i.startswith(name) for name in names for i in interfaces):
        fix = f"set it to one of {', '.join(interfaces)}"
        yield Finding("error", "nccl", f"NCCL_SOCKET_IFNAME={found['NCCL_SOCKET_IFNAME']}: no such interface", fix)
    elif not bad:
        yield Finding("ok", "nccl", shown or "no variable is set")


def driver_version(file: Path = DRIVER_FILE) -> int | None:
    """Return the major version of the NVIDIA driver, or None without one."""
    try:
        match = re.search(r"\s(\d+)\.\d+(\.\d+)?\s", file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return int(match[1]) if match else None


def check_driver(driver: int | None, cuda: str | None, gpus: int) -> Iterator[Finding]:
    """Check that the driver supports the CUDA version that torch was built with."""
    if driver is None:
        yield Finding("ok", "driver", "no NVIDIA driver: runs compute on the CPU")
        return
    if cuda is None:
        fix = "install torch for CUDA: make gpu, or pip install -c requirements/gpu.txt torch"
        yield Finding("error", "driver", f"NVIDIA driver {driver}, but torch without CUDA", fix)
        return
    least = DRIVERS.get(int(cuda.partition(".")[0]), 0)
    text = f"NVIDIA driver {driver}, torch with CUDA {cuda}, {gpus} GPUs"
    if driver < least:
        fix = f"install driver {least} or newer, or a torch for CUDA {min(DRIVERS)}"
        yield Finding("error", "driver", text, fix)
    elif gpus == 0:
        yield Finding("error", "driver", text, "unset CUDA_VISIBLE_DEVICES, or start the container with --gpus all")
    else:
        yield Finding("ok", "driver", text)
