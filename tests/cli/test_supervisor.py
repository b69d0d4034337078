"""When a supervised run is restarted and when not, with a real supervisor and a stub of the run."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from plasmid_cli.main import app

sys.path.insert(0, str(Path(__file__).parent))
import supervised_stub as stub

STUB = stub.__file__
RUNS = {"batch": 3, "phase": "train"}
KILLED, RETRY = -signal.SIGKILL, 75


def supervise(folder, *attempts, max_restarts=5):
    """Return exit code, terminal lines, and the folders that were resumed."""
    (folder / "run/logs").mkdir(parents=True, exist_ok=True)
    with (folder / "stderr.txt").open("w") as stderr:
        if (child := os.fork()) == 0:  # a new interpreter would take half a second to import the supervisor
            _supervise(folder, max_restarts, list(map(json.dumps, attempts)), stderr)
        descriptor = os.pidfd_open(child)
        if not select.select([descriptor], [], [], 60)[0]:
            os.kill(child, signal.SIGKILL)
        os.close(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = (folder / "stderr.txt").read_text()
    assert "Traceback" not in said, said
    return code, said.splitlines(), (folder / "dirs.txt").read_text().split("\n")[:-1]


def _supervise(folder, max_restarts, attempts, stderr):
    """Become the supervisor; never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        sys.stderr = stderr
        code = stub.main(folder, max_restarts, attempts)
    except BaseException:  # noqa: BLE001  its caller reads the traceback
        traceback.print_exc()
    finally:
        stderr.flush()
        os._exit(code)


@pytest.mark.parametrize("code", [0, 2, 130])
def test_finished_invalid_and_stopped_runs_are_not_restarted(tmp_path, code):
    assert supervise(tmp_path, [RUNS, {"error": "trainer.lr: no such setting"}, code]) == (code, [], [""])


@pytest.mark.parametrize(
    ("end", "cause"),
    [(RETRY, "trainer-1 died"), (1, "trainer-1 died"), (KILLED, "killed by SIGKILL"), (-6, "killed by SIGABRT")],
)
def test_a_dead_run_is_resumed_and_the_cause_is_reported_once(tmp_path, end, cause):
    first = [{"run_dir": "run"}, RUNS, {"error": "trainer-1 died"}, end]
    code, (line,), resumed = supervise(tmp_path, first, [RUNS, 0])
    assert (code, resumed) == (0, ["", "run"])
    assert line.startswith(f"warning: the run died in batch 4: {cause}; restart 1 of 5 in 0.0")
    assert (tmp_path / "run/logs/driver.log").read_text().endswith(f"{line}\n")


def test_a_run_that_dies_twice_in_the_same_batch_is_not_restarted_again(tmp_path):
    dies = [{"run_dir": "run"}, RUNS, {"error": "no room for the gradients"}, RETRY]
    code, lines, _ = supervise(tmp_path, dies, dies, [0])
    expected = "error: the run died twice in batch 4 with no new checkpoint, so it is not restarted: no room for the "
    assert code == RETRY and len(lines) == 2 and lines[1] == f"{expected}gradients"


def test_a_new_checkpoint_resets_the_restart_count(tmp_path):
    dies = [{"run_dir": "run"}, RUNS, {"saved": 3}, KILLED]
    code, lines, _ = supervise(tmp_path, *[dies] * 4, [0], max_restarts=1)
    assert code == 0 and len(lines) == 4 and all("; restart 1 of 1 in " in line for line in lines)


def test_the_restart_limit_ends_supervision_with_the_last_cause(tmp_path):
    dies = [[{"run_dir": "run", "batch": batch, "phase": "train"}, KILLED] for batch in range(4)]
    code, lines, _ = supervise(tmp_path, *dies, max_restarts=2)
    assert code == 128 + 9
    assert lines[-1] == "error: no new checkpoint after 2 restarts, the limit: killed by SIGKILL"
    assert len(lines) == 3


def test_starts_may_fail_more_than_once_if_one_succeeded_before(tmp_path):
    runs, starts = [{"run_dir": "run"}, RUNS, KILLED], [{"phase": "start"}, {"error": "no free machine"}, RETRY]
    assert supervise(tmp_path, runs, starts, starts, starts, [0])[0] == 0
    (tmp_path / "dirs.txt").unlink()
    code, lines, _ = supervise(tmp_path, starts, starts, [0])
    assert code == RETRY and lines[-1].startswith("error: the run died twice while starting ")


def test_processes_of_a_dead_run_are_killed_before_the_restart(tmp_path):
    (tmp_path / "short.py").write_text(
        f"import sys, runpy; sys.path.insert(0, {str(Path(STUB).parent)!r})\n"
        "from plasmid_cli.supervision import supervisor; supervisor.CLEANUP_S = 0.2\n"
        f"sys.argv = [{STUB!r}, '.', '5', *sys.argv[1:]]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    attempts = [json.dumps(one) for one in (["leave a process", RUNS, KILLED], [0])]
    done = subprocess.run([sys.executable, "short.py", *attempts], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0
    assert not Path(f"/proc/{(tmp_path / 'left.txt').read_text()}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_run_and_nothing_is_restarted(tmp_path, number):
    command = [sys.executable, STUB, str(tmp_path), "5", json.dumps([RUNS, "wait", KILLED])]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path, preexec_fn=os.setpgrp)
    while not (tmp_path / "waiting").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")


@pytest.mark.parametrize("option", ["--dry-run", "--rollouts-only", "--replay=runs/sums"])
def test_runs_that_save_nothing_are_refused(option, capsys):
    with pytest.raises(SystemExit) as ended:
        app(["train", "recipe.toml", "--supervise", option])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --supervise: needs checkpoints; remove ")
