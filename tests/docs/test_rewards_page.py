"""Every block of docs/plugins/rewards.md works, in the order of the page."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from plasmid import load_config
from plasmid.errors import ConfigError, PlasmidError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plugins" / "rewards.md"
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOCAL_RUN = """
import sys
from plasmid import load_config
from plasmid.run.local import LocalCluster
from plasmid.run.session import Mode, run
items = [item for item in sys.argv[1:] if item != "--rollouts-only"]
recipes = [item for item in items if "=" not in item]
config = load_config(recipes, [item for item in items if "=" in item])
run(config, mode=Mode(rollouts_only=True), make_cluster=lambda _: LocalCluster())
"""
SMALL = ("run.prompts_per_batch=2", "trainer.dtype=float32", "rollout.dtype=float32", "trackers=[]")


def call(command: list[str], folder: Path) -> str:
    """Run one command of the page; pip installs into a folder of its own instead of the environment."""
    site = folder / "site-packages"
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_TARGET": str(site),
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(site),
        "COLUMNS": "200",
    }
    done = subprocess.run(command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_page(folder: Path, *, in_one_process: bool) -> dict[str, str]:
    """Write the files of the page and run its commands; returns what each printed.

    In one process rollouts are made without Ray, and the training at the end is left to the long test.
    """
    printed = {}
    for language, name, text in BLOCK.findall(PAGE.read_text()):
        if language != "bash":
            if name != "error":
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)
            continue
        for line in text.splitlines():
            command = shlex.split(line)
            if command[:2] == ["rl", "train"] and "--dry-run" not in command:
                command += SMALL
                if in_one_process:
                    if "--rollouts-only" not in command:
                        continue
                    command = [sys.executable, "-c", LOCAL_RUN, *command[2:]]
            printed[line] = call(command, folder)
    return printed


def check(printed: dict[str, str]) -> None:
    """The outputs say what the page says they say."""
    assert "6 passed" in printed["python -m pytest test_my_reward.py"]
    assert "Difference to the target at which half" in printed["rl options closeness --plugin ./my_reward.py"]
    assert "closeness.difference" in printed["rl view runs/look --order best"]
    assert len(printed["python rescore.py"].splitlines()) == 2 * 2 * 8
    assert "plasmid-reward-closeness 0.1.0" in printed["rl plugins"]


def test_the_page_works_from_top_to_bottom(checkout):
    check(run_page(checkout, in_one_process=True))


@pytest.mark.long
def test_the_page_works_exactly_as_written(checkout):
    check(run_page(checkout, in_one_process=False))


def test_the_error_that_the_page_shows_is_what_is_said(checkout, monkeypatch):
    blocks = {name: text for _, name, text in BLOCK.findall(PAGE.read_text()) if name}
    for name in ("my_reward.py", "closeness.toml"):
        (checkout / name).write_text(blocks[name])
    monkeypatch.chdir(checkout)
    with pytest.raises(ConfigError) as caught:
        load_config(["recipes/smollm2-sums-cpu.toml", "closeness.toml"], ["rewards.1.scal=3"])
    assert str(caught.value) + "\n" == blocks["error"]


def test_every_block_of_the_page_is_of_a_kind_that_is_run():
    fences = PAGE.read_text().count("\n```")
    blocks = BLOCK.findall(PAGE.read_text())
    assert fences == 2 * len(blocks)
    assert all(language == "bash" or name for language, name, _ in blocks)


@pytest.mark.parametrize(
    ("overrides", "row"),
    [
        (["rewards.1.kind='closenes'"], "`{}` | `rl plugins` lists"),
        (["plugins=['my_reward.py','other.py']"], "`{}` | paths are relative"),
        (["plugins=['./my_reward.py','./again.py']"], "`{}: ...` | uninstall one, or leave the file out"),
    ],
)
def test_the_table_of_errors_quotes_what_is_said(checkout, monkeypatch, overrides, row):
    blocks = {name: text for _, name, text in BLOCK.findall(PAGE.read_text()) if name}
    for name, source in (("my_reward.py", "my_reward.py"), ("again.py", "my_reward.py"), ("closeness.toml",) * 2):
        (checkout / name).write_text(blocks[source])
    monkeypatch.chdir(checkout)
    with pytest.raises(PlasmidError) as caught:
        load_config(["recipes/smollm2-sums-cpu.toml", "closeness.toml"], overrides)
    said = re.split("; installed are|: plasmid_plugin", str(caught.value))[0].replace("other.py", "my_reward.py")
    assert row.format(said) in PAGE.read_text()
