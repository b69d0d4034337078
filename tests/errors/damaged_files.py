"""Every kind of damage to single files of a run or a model, and commands that read them."""

import contextlib
import io
import json
import os
import signal
import traceback

from plasmid_cli.main import app
from plasmid_runtime.cluster.local import LocalCluster

HUGE = 10**400
LIMIT_S = 120


def flip(file, other):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut(file, other):
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size * 2 // 3)


def empty(file, other):
    file.write_bytes(b"")


def delete(file, other):
    file.unlink()


def put_folder(file, other):
    file.unlink()
    file.mkdir()


def put_pipe(file, other):
    file.unlink()
    os.mkfifo(file)


def put_dangling_link(file, other):
    file.unlink()
    file.symlink_to("nowhere")


def swap(file, other):
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def change_types(file, other):
    """Change types: numbers become texts, texts numbers, and lists and objects each other."""
    _rewrite(file, _change_type)


def enlarge_numbers(file, other):
    """Make all numbers huge."""
    _rewrite(file, lambda value: HUGE if isinstance(value, int | float) else value)


DAMAGE = (
    flip,
    cut,
    empty,
    delete,
    put_folder,
    put_pipe,
    put_dangling_link,
    swap,
    change_types,
    enlarge_numbers,
)
OF_TEXT = (change_types, enlarge_numbers)


def _change_type(value):
    if isinstance(value, bool) or value is None:
        return "yes"
    return {int: "7", float: "0.5", str: 7, list: {"0": 1}, dict: [1]}[type(value)]


def _rewrite(file, change):
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    file.write_text("\n".join(json.dumps(_changed(json.loads(line), change)) for line in lines) + "\n")


def _changed(value, change, depth=0):
    """Change the leaves, and containers below the first two levels."""
    if isinstance(value, dict) and (depth < 2 or change is not _change_type):
        return {key: _changed(one, change, depth + 1) for key, one in value.items()}
    if isinstance(value, list) and change is not _change_type:
        return [_changed(one, change, depth + 1) for one in value]
    return change(value)


def run_command(*arguments):
    """Run `rl` in this process. Returns its exit code and standard error; raises if it does not end."""

    def give_up(*_):
        raise AssertionError(f"rl {' '.join(arguments)}: does not end")

    out, err, before = io.StringIO(), io.StringIO(), signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT_S)
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app(arguments, make_cluster=lambda _: LocalCluster())
    except SystemExit as end:
        code = end.code or 0
    except Exception:  # noqa: BLE001  the command prints it and ends with code 1
        err.write(traceback.format_exc())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, err.getvalue()


def find_problem(code, err):
    """Return what is wrong with a result; empty if it is a success, or a failure with one clear line."""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    if "Traceback" in err:
        return f"a traceback: {err.splitlines()[-1][:300]}"
    if code not in (0, 1, 2, 75):
        return f"exit code {code}"
    if code in (2, 75) and len(errors) != 1:
        return f"{len(errors)} errors: {err[:300]}"
    if any(len(line) > 2000 for line in err.splitlines()):
        return "a line of over 2,000 characters"
    return ""
