"""Installation on machines with GPUs, as far as it can be checked without one and without downloads."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements/gpu.txt", "requirements/gpu-newest.txt")
sys.path.insert(0, str(ROOT / "scripts"))


def pinned(lock):
    lines = [line for line in (ROOT / lock).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in map(Requirement, lines)}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_a_fitting_version_of_everything_that_our_packages_ask_for(lock):
    from gpu_lock import LEFT_OUT
    from pins import requirements

    found = pinned(lock)
    for one in requirements(dev=False):
        name = canonicalize_name(one.name)
        if name.partition("-")[0] not in {"plasmid", *LEFT_OUT}:
            assert one.specifier.contains(found[name], prereleases=True), f"{one}: {lock} has {found.get(name)}"


def test_the_lock_is_of_the_versions_that_were_measured():
    page = (ROOT / "docs/performance.md").read_text()
    found = pinned(LOCKS[0])
    assert f"torch {found['torch'].removesuffix('.0')} with CUDA 13, SGLang {found['sglang']}" in page


def test_the_page_names_the_versions_of_the_locks():
    page = (ROOT / "docs/install.md").read_text()
    for lock in LOCKS:
        found = pinned(lock)
        assert f"| `{lock}` | {found['torch']} | {found['sglang']} | {found['transformers']} |" in page


@pytest.mark.parametrize("lock", LOCKS)
def test_make_gpu_installs_every_package_by_the_lock_and_looks_at_the_machine(lock):
    command = ["make", "--dry-run", "gpu", f"LOCK={lock}"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    install = next(shlex.split(line) for line in lines if "-e packages/core" in line)
    assert install[install.index("--constraint") + 1] == lock
    assert {word for word in install if word.startswith("packages/")} == {
        f"packages/{file.parent.name}" for file in ROOT.glob("packages/*/pyproject.toml")
    } - {"packages/rollout-vllm"}
    assert ".[all]" in install and lines[-1] == ".venv-gpu/bin/rl doctor"


def test_the_containerfile_copies_what_there_is_and_takes_the_lock():
    text = (ROOT / "Containerfile").read_text()
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line
    instructions = re.findall(r"^([A-Z]+) ", re.sub(r"\\\n", " ", text), re.MULTILINE)
    assert set(instructions) <= {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "VOLUME", "CMD"}
    assert "ARG LOCK=requirements/gpu.txt" in text and '--constraint "$LOCK"' in text
    for script in re.findall(r"^RUN (.*)$", re.sub(r"\\\n", " ", text), re.MULTILINE):
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_the_extras_of_the_page_are_those_of_the_distribution():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs/install.md").read_text()
    assert {
        name for row in re.findall(r"^\| (`.*?`) \| ", page, re.MULTILINE) for name in re.findall(r"`([a-z]+)`", row)
    } == set(extras)


@pytest.mark.parametrize(("asked", "status"), [(["--check"], 0), ([], 1)])
def test_an_unreachable_network_does_not_fail_the_lock_check(asked, status):
    unreachable = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/gpu_lock.py", *asked],
        env=os.environ | unreachable | {"UV_HTTP_RETRIES": "0", "UV_NO_CACHE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert "gpu.txt: NOT checked: cannot reach the package index" in done.stderr
