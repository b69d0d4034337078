"""More targets of `fuzz.py`: run folders, tokenizers, chat templates, the control channel."""

import contextlib
import importlib
import json
import shutil
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tests.security import fuzz_mutations as mutations
from tests.security.fuzz_targets import RUN, TOP, WEB, Check, Finding, Target
from tests.security.model_files import make_tokenizer

# Run folders


@cache
def cases_of_runs():
    sys.path.insert(0, str(TOP / "tests/cli"))
    try:
        return importlib.import_module("conftest")
    finally:
        sys.path.pop(0)
        sys.modules.pop("conftest", None)


def viewed(name: str) -> Callable:
    """Return a target of `rl view` whose input is one file of the run folder."""

    @contextlib.contextmanager
    def opened() -> Iterator[Check]:
        from plasmid_cli.main import app

        shutil.rmtree("run", ignore_errors=True)
        file = cases_of_runs().write_run(Path("run"), batches=2, every=2) / name

        def view(report: bool) -> None:
            app(["view", "run", "--count", "4", "--order", "stored", "--report" if report else "--no-report"])

        def check(data: bytes) -> None:
            file.write_bytes(data)
            view(report=zlib.crc32(data) % 8 == 0)  # takes long, because it draws charts

        with contextlib.suppress(SystemExit):
            view(report=True)  # libraries search for fonts the first time
        yield check

    return opened


def files_of_runs(pattern: str) -> Callable[[], list[bytes]]:
    def examples() -> list[bytes]:
        shutil.rmtree("example", ignore_errors=True)
        cases_of_runs().write_run(Path("example"), batches=2, every=2)
        return [file.read_bytes() for file in sorted(Path("example").glob(pattern))]

    return examples


# Tokenizers

CHAT = [{"role": "user", "content": "1+1 <eos>"}, {"role": "assistant", "content": "2"}]


@contextlib.contextmanager
def folder_of_tokenizer(name: str) -> Iterator[Check]:
    """Return a target whose input is one file of the tokenizer in a model folder."""
    from plasmid_models.tokenization.tokenizer import Tokenizer

    shorten_templates()
    folder = make_tokenizer(Path("model"))

    def check(data: bytes) -> None:
        (folder / name).write_bytes(data)
        tokenizer = Tokenizer(folder)
        ids, text = tokenizer.encode_prompt(CHAT, {})
        tokenizer.decode(ids)
        tokenizer.encode("say <eos>", allow_special=False)
        if not isinstance(text, str) or not isinstance(tokenizer.pad_token_id, int):
            raise Finding(f"the text of a chat is {text!r:.100}, its padding {tokenizer.pad_token_id!r:.100}")

    yield check


@contextlib.contextmanager
def chat_template() -> Iterator[Check]:
    from plasmid_models.tokenization.tokenizer import Tokenizer

    shorten_templates()
    folder = make_tokenizer(Path("model"))

    def check(data: bytes) -> None:
        Path("template.jinja").write_bytes(data)
        Tokenizer(folder, chat_template="template.jinja").encode_prompt(CHAT, {})

    yield check


def shorten_templates() -> None:
    """Stop endless templates sooner."""
    vars(importlib.import_module("plasmid_models.tokenization.templates"))["TIMEOUT_S"] = 1.0


def tokenizer_files(name: str) -> Callable[[], list[bytes]]:
    return lambda: [(make_tokenizer(Path("example")) / name).read_bytes()]


TEMPLATES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}",
    "{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n ~ m['content']|trim }}"
    "{% endfor %}"
    "{{ bos_token }}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
    "{% macro show(m) %}{{ m | tojson(indent=2) }}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"
    "{{ strftime_now('%Y') }}{{ messages | length }}{{ range(3) | join(',') }}",
)

# The control channel of weight syncs

KEY = b"k" * 32


@contextlib.contextmanager
def control_server() -> Iterator[Check]:
    """The server of the channel. The input is all bytes that a stranger sends; afterwards it must still serve the
    run."""
    from plasmid_serving.weights.control import ControlServer

    server = ControlServer(KEY)
    address, count = server.address, 0

    def check(data: bytes) -> None:
        nonlocal count
        count += 1
        with socket.create_connection((address.host, address.port), 5) as stranger, contextlib.suppress(OSError):
            stranger.settimeout(0.2 if len(data) < 64 else 5)
            greeting = stranger.recv(32, socket.MSG_WAITALL)
            stranger.sendall(data)
            if len(greeting) != 32 or stranger.recv(1):
                raise Finding("the server has answered a stranger")
        if count % 20 == 1:
            address.put(f"{count}/x", {"n": count})
            if address.get(f"{count}/x", 5.0) != {"n": count}:
                raise Finding("the server has lost a message")

    try:
        yield check
    finally:
        server.close()


@contextlib.contextmanager
def control_peer() -> Iterator[Check]:
    """The server of the channel with a peer that knows the key but sends what no client does. Others must still be
    served."""
    from plasmid_serving.weights.control import ControlError, ControlServer

    server = ControlServer(KEY)
    address, count = server.address, 0

    def check(data: bytes) -> None:
        nonlocal count
        count += 1
        name, _, body = data.partition(b"\n")
        with contextlib.suppress(ControlError):
            address.request(body, **peer_header(name))
        address.put(f"{count}/x", {"n": count})
        if address.get(f"{count}/x", 5.0) != {"n": count}:
            raise Finding("the server has lost a message")

    try:
        yield check
    finally:
        server.close()


def peer_header(data: bytes) -> dict:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {"operation": mutations.decoded(data)}
    return found if isinstance(found, dict) else {"operation": found}


@contextlib.contextmanager
def control_client() -> Iterator[Check]:
    """The client of the channel. The input is all bytes from its server: it must get one line, and give up in time."""
    control = importlib.import_module("plasmid_serving.weights.control")
    vars(control).update(CONNECT_S=0.2, HANDSHAKE_S=0.2)
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    answer = b""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(answer)
                    connection.settimeout(0.1)
                    connection.recv(1 << 16)

    threading.Thread(target=serve, daemon=True).start()
    address = control.ControlAddress(*listener.getsockname()[:2], KEY)

    def check(data: bytes) -> None:
        nonlocal answer
        answer = data
        try:
            address.get("queue")
        except control.ControlError as error:
            if "\n" in str(error) or len(str(error)) > 1000:
                raise Finding(f"an error is {error}") from error
            return
        raise Finding("a server without the key has been believed")

    try:
        yield check
    finally:
        listener.close()


def frames() -> list[bytes]:
    """Return a hello of 64 bytes and a frame, as strangers and servers without the key would invent them."""
    body = b'{"operation": "put", "queue": "t/0/buckets"}\n{"over": true}'
    return [b"h" * 64 + len(body).to_bytes(4, "big") + b"m" * 32 + body, b"h" * 64]


def peer_requests() -> list[bytes]:
    requests = [
        {"operation": "put", "queue": "t/0/buckets"},
        {"operation": "get", "queue": "t/0/answers", "wait_s": 0.0, "heartbeat": "t"},
        {"operation": "heartbeats", "token": "t"},
    ]
    return [json.dumps(one).encode() + b"\n" + b'{"over": true}' for one in requests]


VIEW = (*RUN, "plasmid_cli.reports.view", "plasmid_cli.reports.report", "pyarrow.parquet", "tokenizers")
TOKENS = (*WEB, "plasmid_models.tokenization.tokenizer", "tokenizers", "transformers")
CONTROL = ("plasmid_serving.weights.control",)
FOLDER_TARGETS: dict[str, Target] = {
    **{
        f"view-{name}": Target(
            share=share,
            examples=files_of_runs(pattern),
            mutate=mutate,
            opened=viewed(file),
            modules=VIEW,
            memory_mb=512,
        )
        for name, share, pattern, file, mutate in (
            ("metrics", 600, "metrics.jsonl", "metrics.jsonl", mutations.lines_of),
            ("evaluations", 400, "evaluations.jsonl", "evaluations.jsonl", mutations.lines_of),
            ("config", 400, "config.json", "config.json", mutations.json_of),
            ("info", 200, "run.json", "run.json", mutations.json_of),
            ("samples", 900, "samples/batch-000002.parquet", "samples/batch-000002.parquet", mutations.bytes_of),
            ("tokenizer", 400, "final/tokenizer.json", "final/tokenizer.json", mutations.json_of),
        )
    },
    "tokenizer": Target(
        share=1000,
        examples=tokenizer_files("tokenizer.json"),
        mutate=mutations.json_of,
        opened=lambda: folder_of_tokenizer("tokenizer.json"),
        modules=TOKENS,
        starts_processes=True,  # the process that renders chat templates
    ),
    "tokenizer-config": Target(
        share=800,
        examples=tokenizer_files("tokenizer_config.json"),
        mutate=mutations.json_of,
        opened=lambda: folder_of_tokenizer("tokenizer_config.json"),
        modules=TOKENS,
        starts_processes=True,
    ),
    "chat-template": Target(
        share=1000,
        examples=lambda: [text.encode() for text in TEMPLATES],
        mutate=mutations.text_of,
        opened=chat_template,
        modules=TOKENS,
        starts_processes=True,
    ),
    "control-server": Target(
        share=600, examples=frames, mutate=mutations.bytes_of, opened=control_server, modules=CONTROL
    ),
    "control-peer": Target(
        share=600, examples=peer_requests, mutate=mutations.text_of, opened=control_peer, modules=CONTROL
    ),
    "control-client": Target(
        share=300, examples=frames, mutate=mutations.bytes_of, opened=control_client, modules=CONTROL
    ),
}
