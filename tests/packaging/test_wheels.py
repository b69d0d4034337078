"""The wheels are complete: installed from a folder into an empty environment, `rl` lists, explains and trains.

Third-party packages are not installed again: a path file makes those of this environment available after the wheels are
installed.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECTS = (
    "packages/core",
    "packages/models",
    "packages/sandbox",
    "packages/convert",
    "packages/training",
    "packages/workflows",
    "packages/runtime",
    "packages/serving",
    "packages/backend-fsdp",
    "packages/backend-megatron",
    "packages/rollout-hf",
    "packages/rollout-sglang",
    "packages/rollout-vllm",
    "packages/rewards",
    "packages/agents",
    "packages/cli",
    ".",
)
RECIPE = """
model.path = "MODEL"
run = { batches = 1, prompts_per_batch = 2, samples_per_prompt = 2 }
sampling.max_new_tokens = 4
trainer.kind = "fsdp"
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{ kind = "random" }]
data.path = "prompts.jsonl"
trackers = [{ kind = "tensorboard" }]
"""

pytestmark = pytest.mark.long


def run(*command: object, cwd: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "PLASMID"))}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> list[Path]:
    dist = tmp_path_factory.mktemp("dist")
    for project in PROJECTS:
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", dist, project, cwd=ROOT)
    return sorted(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def bin_(wheels, tmp_path_factory) -> Path:
    """Return the folder of programs of an environment with the installed wheels."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *wheels, cwd=folder)
    # older Pythons install an old setuptools, which would take precedence
    run(folder / "bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    lent = Path(sysconfig.get_path("purelib"))
    helper = lent / "sglang_cpu.pth"  # without it, the torchvision of the tests' SGLang cannot be imported
    (site / "third_party.pth").write_text(f"{lent}\n{helper.read_text() if helper.is_file() else ''}")
    return folder / "bin"


def test_there_is_a_wheel_of_every_distribution_with_its_files(wheels):
    names = [wheel.name.split("-")[0] for wheel in wheels]
    assert names == [
        "plasmid",
        "plasmid_agents",
        "plasmid_cli",
        "plasmid_convert",
        "plasmid_core",
        "plasmid_fsdp",
        "plasmid_hf",
        "plasmid_megatron",
        "plasmid_models",
        "plasmid_rewards",
        "plasmid_runtime",
        "plasmid_sandbox",
        "plasmid_serving",
        "plasmid_sglang",
        "plasmid_training",
        "plasmid_vllm",
        "plasmid_workflows",
    ]
    packed = {n.split("-")[0]: set(zipfile.ZipFile(wheel).namelist()) for n, wheel in zip(names, wheels, strict=True)}
    for project in PROJECTS[:-1]:
        (package,) = (p for p in (ROOT / project / "src").iterdir() if p.name.startswith("plasmid") and p.is_dir())
        distribution = "plasmid_core" if package.name == "plasmid" else package.name
        files = {
            p.relative_to(package.parent).as_posix()
            for p in package.rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        }
        assert files <= packed[distribution]
        assert f"{package.name}/py.typed" in files
    assert not [file for file in packed["plasmid"] if not file.startswith("plasmid-0.1.0.dist-info/")]


LIGHT = ("plasmid_core", "plasmid_sandbox", "plasmid_rewards")
CONTRACT = """
import sys
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.testing.light_contracts import check_filter, check_reward
from plasmid.testing.rewards import make_prompt

classes = find_components(load_plugins())
check_reward(classes["rewards"]["number"](), make_prompt("1+1=", target=2))
check_reward(classes["rewards"]["f1"](), make_prompt("who?", target="me"))
check_filter(classes["filters"]["nonzero-spread"]())
print(sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""


def test_a_reward_and_its_contract_need_neither_torch_nor_ray(wheels, tmp_path):
    """In an environment with only the requirements of the wheels."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    ours = [wheel for wheel in wheels if wheel.name.split("-")[0] in LIGHT]
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *ours, cwd=tmp_path)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for name in needed(*LIGHT):
        for file in distribution(name).files or ():
            top = Path(file).parts[0]
            if top != ".." and not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
    assert run(python, "-c", CONTRACT, cwd=tmp_path).strip() == "[]"
    done = subprocess.run([python, "-c", "import torch"], cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'torch'" in done.stderr


def needed(*names: str) -> set[str]:
    """Return the third-party distributions that these require, directly or indirectly, without extras."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        for text in distribution(todo.pop()).requires or ():
            requirement = Requirement(text)
            name = requirement.name.replace("-", "_")
            if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                found.add(name)
                todo.append(name)
    return {name for name in found if not name.startswith("plasmid")}


def test_requirements_of_the_wheels_are_compatible(bin_):
    done = subprocess.run([bin_ / "python", "-m", "pip", "check"], cwd=bin_, capture_output=True, text=True)
    # the SGLang of the tests has none of the CUDA packages that it requires
    assert [line for line in done.stdout.splitlines() if line.startswith("plasmid")] == []


def test_the_command_lists_and_explains(bin_, tmp_path):
    where = run(
        bin_ / "python", "-c", "import plasmid, plasmid_cli; print(plasmid.__file__, plasmid_cli.__file__)", cwd=bin_
    )
    assert all(Path(file).is_relative_to(bin_.parent) for file in where.split())
    listed = run(bin_ / "rl", "plugins", cwd=tmp_path)
    for kind in ("fsdp", "hf", "grpo", "files", "single-turn", "exact-match", "nonzero-spread", "tensorboard", "gguf"):
        assert f" {kind} " in listed
    assert "prompts_per_batch" in run(bin_ / "rl", "options", "run", cwd=tmp_path)


def test_one_batch_is_trained(bin_, tiny_model, tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("MODEL", str(tiny_model)))
    rows = "".join(json.dumps({"prompt": f"{i}+1=", "target": str(i + 1)}) + "\n" for i in range(4))
    (tmp_path / "prompts.jsonl").write_text(rows)
    run(bin_ / "rl", "train", "recipe.toml", cwd=tmp_path)
    folder = tmp_path / "runs/recipe"
    assert json.loads((folder / "metrics.jsonl").read_text())["step"] == 1
    assert (folder / "final/config.json").is_file()
    assert list((folder / "tensorboard").iterdir())
    run(bin_ / "rl", "view", "runs/recipe", cwd=tmp_path)
    assert "<html" in (folder / "report.html").read_text()
