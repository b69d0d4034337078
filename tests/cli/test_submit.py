"""`rl submit` writes a Slurm job; bash checks the script and runs it with stand-ins for Slurm and Ray."""

import os
import shlex
import signal
import subprocess
import time

import pytest
from plasmid.errors import ConfigError
from plasmid_cli.main import cli
from plasmid_models.testing import make_empty_model

RECIPE = """
model.path = "model"
trainer.kind = "fsdp"
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{ kind = "exact-match" }]
data.path = "train.jsonl"
"""
TWO_NODES = ["placement.nodes=2", "placement.trainer_ranks=16", "placement.engine_ranks=16", "placement.colocated=true"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_empty_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "target": "b"}\n')
    (tmp_path / "job.toml").write_text(RECIPE)
    return tmp_path


def script(capsys, *arguments, recipe="job.toml"):
    cli(["submit", recipe, *arguments, "--write-only"], standalone_mode=False)
    text = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def directives(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_nodes_gpus_and_cpus_follow_from_the_placement(folder, capsys):
    text = script(capsys, *TWO_NODES, "--time", "12:00:00", "--partition", "gpu", "--sbatch=--constraint=h100")
    assert {"--nodes=2", "--gpus-per-node=8", "--cpus-per-task=36", "--ntasks-per-node=1"} <= set(directives(text))
    assert {"--time=12:00:00", "--partition=gpu", "--constraint=h100", "--signal=B:TERM@300"} <= set(directives(text))
    assert "RAY_AUTH_MODE=token" in text and "--num-gpus=8" in text
    assert 'placement.address="$address:$port"' in text and "--resume-auto" in text


def test_one_node_needs_no_ray_of_the_job(folder, capsys):
    text = script(capsys, "placement.device=cpu", "--cpus", "16", "--setup", "source env.sh")
    assert "ray start" not in text and "placement.address" not in text and "--gpus" not in text
    assert "--cpus-per-task=16" in directives(text) and "\nsource env.sh\n" in text


def test_a_folder_that_the_recipe_names_stays(folder, capsys):
    assert "run.dir=runs/job-" in script(capsys)
    assert script(capsys, 'run.dir="runs/mine"').count("run.dir") == 1


def test_names_and_values_are_never_shell_code(folder, capsys):
    name = "a $(touch owned) `touch owned` 'b'.toml"
    (folder / name).write_text(RECIPE)
    text = script(capsys, 'data.columns.prompt="; touch owned #"', recipe=name)
    line = next(line for line in text.splitlines() if line.startswith("rl train"))
    assert shlex.split(line)[2] == name and 'data.columns.prompt="; touch owned #"' in shlex.split(line)
    done = subprocess.run(
        ["bash", "-c", f"rl() {{ printf '%s\\n' \"$@\"; }}; SLURM_JOB_ID=7; {line} wait"],
        text=True,
        capture_output=True,
        check=True,
    )
    assert name in done.stdout.splitlines() and not (folder / "owned").exists()
    assert not any(set(line) & set(" $`'") for line in directives(text))


@pytest.mark.parametrize("option", ["--time=1\ntouch owned", "--time=1 2", "time"])
def test_options_that_would_end_a_line_are_refused(folder, capsys, option):
    with pytest.raises(ConfigError, match="must start with a dash and have no space or line feed"):
        script(capsys, f"--sbatch={option}")


def test_a_cluster_that_the_recipe_names_cannot_be_a_job(folder, capsys):
    with pytest.raises(
        ConfigError, match=r"^placement.address: must be 'auto' for a job, which starts its own Ray cluster"
    ):
        script(capsys, "placement.address=10.0.0.1:6379")


def test_sbatch_is_given_the_script_and_its_refusal_is_one_line(folder, capsys, monkeypatch):
    (folder / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    sbatch = folder / "bin" / "sbatch"
    sbatch.write_text('#!/bin/bash\n[ "$1" = --parsable ] && cat > submitted && echo "42;cluster"\n')
    sbatch.chmod(0o755)
    cli(["submit", "job.toml"], standalone_mode=False)
    assert capsys.readouterr().out == "submitted job 42; its output goes to slurm-42.log\n"
    assert (folder / "submitted").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=job\n")
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition\n' >&2; exit 1\n")
    with pytest.raises(ConfigError, match=r"^sbatch rejected the job: sbatch: error: invalid partition$"):
        cli(["submit", "job.toml"], standalone_mode=False)
    sbatch.unlink()
    monkeypatch.setenv("PATH", str(folder / "bin"))
    with pytest.raises(ConfigError, match=r"sbatch is not installed; .* add --write-only"):
        cli(["submit", "job.toml"], standalone_mode=False)


STAND_INS = {
    "scontrol": "printf 'n1\\nn2\\n'",
    "srun": 'echo "srun $* token=${#RAY_AUTH_TOKEN}" >> calls; while [ "$1" != ray ]; do shift; done; exec sleep 60',
    "seq": "echo 1",
    "rl": 'echo "rl $*" >> calls; trap "echo told >> calls; exit 130" TERM; touch running; while :; do sleep 0.1; done',
}


def test_the_job_starts_ray_on_every_node_and_tells_the_run_of_its_time_limit(folder, capsys, monkeypatch):
    (folder / "job.sbatch").write_text(script(capsys, *TWO_NODES))
    (folder / "bin").mkdir()
    for name, code in STAND_INS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{code}\n")
        (folder / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "4"}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    job = subprocess.Popen(["bash", "job.sbatch"], env={**os.environ, **slurm, "PATH": path}, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "running").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 130, "the exit code of the run"
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    calls = (folder / "calls").read_text().splitlines()
    head, worker = sorted(line for line in calls if line.startswith("srun"))
    assert "--nodelist=n1 ray start" in head and "--head" in head and "--port=20007" in head
    assert "--nodelist=n2 ray start" in worker and ":20007" in worker
    assert all(line.endswith("token=64") for line in (head, worker))
    run = next(line for line in calls if line.startswith("rl train"))
    assert run.split()[2] == "job.toml" and "run.dir=runs/job-7" in run and run.endswith(":20007")
    assert calls[-1] == "told"
