"""A supervisor over a stub of the run: ``supervised_stub.py FOLDER MAX_RESTARTS ATTEMPT...``.

Each attempt is JSON: messages to the supervisor, and at last how it ends, an exit code or ``-`` and a signal.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main(folder: Path, max_restarts: int, attempts: list[str]) -> int:
    from plasmid_cli.output import begin_transcript, end_transcript
    from plasmid_cli.supervision import supervisor

    supervisor.FIRST_DELAY_S = 0.01
    count = iter(range(len(attempts)))

    def make_command(run_dir: str) -> list[str]:
        with (folder / "dirs.txt").open("a") as file:
            file.write(f"{run_dir}\n")
        return [sys.executable, __file__, "--attempt", attempts[next(count)]]

    begin_transcript()
    code = supervisor.Supervisor(make_command, max_restarts=max_restarts).run()
    end_transcript()
    return code


def attempt(text: str, option: str) -> None:
    *messages, end = json.loads(text)
    link = socket.socket(fileno=int(option.partition("=")[2]))
    for message in messages:
        if message == "leave a process":  # in a session of its own, as servers are
            left = subprocess.Popen(["sleep", "600"], start_new_session=True)
            Path("left.txt").write_text(str(left.pid))
        elif message == "wait":  # as a run that saves on a signal
            signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
            Path("waiting").touch()
            time.sleep(60)
        else:
            link.sendall(json.dumps(message).encode() + b"\n")
    if end < 0:
        os.kill(os.getpid(), -end)
    sys.exit(end)


if __name__ == "__main__":
    if sys.argv[1] == "--attempt":
        attempt(*sys.argv[2:4])
    else:
        sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
