"""Targets of `fuzz.py`: parsers and endpoints, each with valid examples and a function that mutates them.

The check of a target returns for inputs that it accepts, and raises one of the project's errors for inputs that it
refuses. Any other exception is a finding. The current folder is empty except for what the target puts there. Only this
file of the fuzzer imports parts of the packages: if a part moves, its target fails instead of passing.
"""

import asyncio
import contextlib
import importlib
import io
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.security import fuzz_mutations as mutations

TOP = Path(__file__).parents[2]
Check = Callable[[bytes], None]


class Finding(Exception):
    """A forbidden effect that has occurred."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One parser or endpoint."""

    share: int
    """Share of the inputs, relative to other targets."""
    examples: Callable[[], list[bytes]]
    """Valid inputs, all of which are accepted."""
    mutate: Callable[..., bytes]
    opened: Callable[[], contextlib.AbstractContextManager[Check]]
    """Provides the check."""
    modules: tuple[str, ...]
    """Modules imported before processes are forked."""
    starts_processes: bool = False
    cpu_s: float = 5.0
    """CPU time limit for one input, in seconds."""
    memory_mb: int = 256
    """Memory limit for an input, in addition to that of the target."""
    reserves_memory: bool = False
    """True if a library reserves as much memory as a file specifies, without using it; failing to do so counts as a
    refusal."""


@contextlib.contextmanager
def plain(check: Check) -> Iterator[Check]:
    yield check


# Recipes


def check_toml(data: bytes) -> None:
    from plasmid.config.load import read_toml

    Path("recipe.toml").write_bytes(data)
    read_toml(Path("recipe.toml"))


def check_override(data: bytes) -> None:
    from plasmid.config.load import merge, parse_override

    base = {"rewards": [{"kind": "number"}], "run": {"seed": 1}, "sampling": {"stop": ["a"]}}
    merge(base, parse_override(mutations.decoded(data)))


def check_recipe(data: bytes) -> None:
    from plasmid import load_config

    Path("recipe.toml").write_bytes(data)
    load_config("recipe.toml")


def check_command(data: bytes) -> None:
    """The whole command: a recipe that is changed by settings."""
    from plasmid_cli.main import app

    items = [item for item in mutations.decoded(data).split("\n") if item and "\0" not in item]
    Path("model").mkdir(exist_ok=True)
    Path("model/config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    Path("rows.jsonl").write_text('{"prompt": "1", "target": 1}\n')
    Path("recipe.toml").write_text(RECIPE)
    app(["train", "recipe.toml", "--dry-run", "--offline", "--", *items])


RECIPE = """
model.path = "model"
data.path = "rows.jsonl"
trainer.kind = "fsdp"
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{ kind = "number" }]
"""
OVERRIDES = (
    *("trainer.lr=1e-6", "run.seed=3", "sampling.stop=['a', \"b\"]", "rewards.0.weight=2", "model.path=a b"),
    *("rewards=[{kind='number', weight=0.5}, {kind=\"format\"}]", "run={batches=3, dir='x'}", "eval.0.data.path=x"),
)


def recipes() -> list[bytes]:
    return [path.read_bytes() for path in sorted((TOP / "recipes").glob("*cpu.toml"))]


def resolved_recipes() -> list[bytes]:
    """Return recipes that name no files except models and data."""
    named = (b"plugins", b"sglang", b"function")
    return [RECIPE.encode(), *(recipe for recipe in recipes() if not any(word in recipe for word in named))]


# Data


def check_rows(name: str) -> Check:
    def check(data: bytes) -> None:
        import numpy as np
        from plasmid.config.load import validate
        from plasmid.plugins.registry import find_components, load_plugins

        if not sources:
            sources.append(find_components(load_plugins())["data"]["files"])
        source = validate(sources[0], {"kind": "files", "path": name})
        Path(name).write_bytes(data)
        rows = source.rows(lambda prompt, template: (np.zeros(len(str(prompt)), np.int32), ""))
        rows.check()
        for index in range(len(rows)):
            rows.prompt(index)

    sources = []
    return check


def jsonl_files() -> list[bytes]:
    rows = [
        {"prompt": "What is 1+1?", "target": 2, "source": {"name": "a", "level": [1, 2]}},
        {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "1+1"}], "target": "2"},
        {"prompt": "\u00e9", "target": ["1", "2"], "weight": 0.5, "none": None, "flag": True},
    ]
    return ["".join(json.dumps(row) + "\n" for row in part).encode() for part in (rows, rows[:1], rows[1:])]


def parquet_files() -> list[bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    chat = [[{"role": "user", "content": "1+1"}]] * 40
    tables = [
        (pa.table({"prompt": [f"say {i}" for i in range(200)], "target": list(range(200))}), {"row_group_size": 50}),
        (pa.table({"prompt": chat, "target": ["2"] * 40, "x": [{"a": 1.5}] * 40}), {"compression": "zstd"}),
        (pa.table({"prompt": ["a"] * 30, "target": ["2"] * 30}), {"use_dictionary": False, "compression": "none"}),
    ]
    files = []
    for table, settings in tables:
        file = io.BytesIO()
        parquet.write_table(table, file, **settings)
        files.append(file.getvalue())
    return files


# Models and checkpoints


def check_gguf(data: bytes) -> None:
    from plasmid.config.load import validate
    from plasmid_convert import convert

    Path("x.gguf").write_bytes(data)
    shutil.rmtree("out", ignore_errors=True)
    reader, writer = (validate(converter(kind), {"kind": kind}) for kind in ("gguf", "hf"))
    convert(Path("x.gguf"), Path("out"), reader=reader, writer=writer)


def converter(kind: str):
    from plasmid.plugins.registry import converters, load_plugins

    if kind not in _converters:
        _converters.update(converters(load_plugins()))
    return _converters[kind]


_converters: dict = {}


def gguf_files() -> list[bytes]:
    sys.path.insert(0, str(TOP / "tests/core/convert"))
    try:
        cases = importlib.import_module("conftest")
    finally:
        sys.path.pop(0)
        sys.modules.pop("conftest", None)
    width, kv = cases.WIDTH, cases.WIDTH * cases.KV_HEADS // cases.HEADS
    shapes = {"attn_norm": (width,), "ffn_norm": (width,), "attn_q": (width, width), "attn_output": (width, width)}
    shapes |= {"attn_k": (kv, width), "attn_v": (kv, width), "ffn_down": (width, cases.FFN)}
    shapes |= {"ffn_gate": (cases.FFN, width), "ffn_up": (cases.FFN, width)}
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"token_embd.weight": (len(cases.TOKENS), width), "output_norm.weight": (width,)}
    tensors = [(name, shape, cases.F32, b"\0\0\0\x3f" * math.prod(shape)) for name, shape in named.items()]
    return [cases.write_gguf(Path("x.gguf"), cases.metadata("llama"), tensors).read_bytes()]


def check_weights(name: str) -> Check:
    """The tensors of a folder. One of its files is the input."""

    def check(data: bytes) -> None:
        import torch
        from safetensors.torch import save_file

        folder = Path("model")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save_file({"a": torch.ones(2, 3), "b": torch.ones(1)}, folder / "w.safetensors")
        (folder / name).write_bytes(data)
        for _ in converter("hf")().read(folder):
            pass

    return check


def safetensors_files() -> list[bytes]:
    import torch
    from safetensors.torch import save

    return [
        save({"a": torch.ones(2, 3), "b": torch.zeros(1, dtype=torch.bfloat16)}, {"format": "pt"}),
        save({"x": torch.ones(4, 4, dtype=torch.int64)}),
    ]


@contextlib.contextmanager
def distributed_folder() -> Iterator[Check]:
    """The metadata of a checkpoint in torch's distributed format, with matching tensor files."""
    from plasmid.errors import ModelError
    from plasmid_convert.distributed.files import DistributedFiles, TensorReader

    folder = Path("trainer")
    metadata_files()

    def check(data: bytes) -> None:
        (folder / ".metadata").write_bytes(data)
        with contextlib.suppress(ModelError):
            TensorReader(folder).read_metadata()
        files = DistributedFiles(folder)
        for name in files.tensors:
            files.read(name)

    yield check


def metadata_files() -> list[bytes]:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    shutil.rmtree("trainer", ignore_errors=True)
    tensors = {"weights.a": torch.zeros(4, 4), "weights.b": torch.ones(3, dtype=torch.bfloat16), "step": torch.ones(())}
    save(tensors, storage_writer=FileSystemWriter("trainer"), no_dist=True)
    return [Path("trainer/.metadata").read_bytes()]


@contextlib.contextmanager
def megatron_state() -> Iterator[Check]:
    """Megatron's ``common.pt``, which is read before any other state of a trainer."""
    from plasmid.errors import CheckpointError
    from plasmid_megatron.checkpoint.state import load_state

    metadata_files()
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    versions |= {"common_backend": "torch", "common_backend_version": 1}
    Path("trainer/metadata.json").write_text(json.dumps(versions))

    def check(data: bytes) -> None:
        Path("trainer/common.pt").write_bytes(data)
        try:
            load_state(Path("trainer"), {}, set())
        except CheckpointError as error:
            # a file that was read is refused too, because the trainer has no models
            if "the checkpoint belongs to a different algorithm" not in str(error):
                raise

    yield check


def common_files() -> list[bytes]:
    import torch

    state = {"steps": {"policy": 3}, "num_ranks": 1, "policy": {"optimizer": {"param_groups": [{"lr": 0.1}]}}}
    file = io.BytesIO()
    torch.save({**state, "rng": torch.zeros(8, dtype=torch.uint8)}, file)
    return [file.getvalue()]


def check_state(data: bytes) -> None:
    from plasmid.config.stored_recipe import resolve_stored
    from plasmid_runtime.checkpoint.folder import read_state

    Path("state.json").write_bytes(data)
    resolve_stored(read_state(Path()).config, Path())


def states() -> list[bytes]:
    import tomllib

    state = {"batch": 1, "version": 1, "producer": {}, "components": {}}
    configs = [tomllib.loads(mutations.decoded(recipe)) for recipe in resolved_recipes()]
    configs = [{**config, "model": {**config["model"], "path": "model"}} for config in configs]  # no download
    return [json.dumps({**state, "config": config}).encode() for config in configs]


# Texts of a policy


def check_tool_calls(data: bytes) -> None:
    from plasmid_workflows.tools.tool_calls import PARSERS

    text = mutations.decoded(data)
    for parse in PARSERS.values():
        for call in parse(text).calls:
            if not (isinstance(call.name, str) and isinstance(dict(call.arguments), dict)):
                raise Finding(f"a call is {call!r:.200}")


def tool_calls() -> list[bytes]:
    from plasmid_workflows.tools.tool_calls import EXAMPLES

    filled = [text.replace("VALUE", '{"a": [1, "x"]}') for text in EXAMPLES.values()]
    more = ("```tool_code\nf(x=-1, y=[1, {'a': 2}])\ng()\n```", '[TOOL_CALLS]f[CALL_ID]1[ARGS]{"x": 1}</s>')
    return [text.encode() for text in (*filled, *more, "".join(filled))]


def reward(kind: str, **settings):
    """Return a target for the answers that a reward scores: every text must get a score."""

    @contextlib.contextmanager
    def opened() -> Iterator[Check]:
        from plasmid.config.load import validate
        from plasmid.plugins.registry import find_components, load_plugins
        from plasmid.testing.rewards import make_prompt, make_sample

        judge = validate(find_components(load_plugins())["rewards"][kind], {"kind": kind, **settings})
        prompt = make_prompt(target="B" if kind == "gpqa" else "1/2")
        with running() as run:
            try:
                yield lambda data: run(scored(judge, prompt, make_sample(mutations.decoded(data))))
            finally:
                run(judge.close())

    return opened


async def scored(judge, prompt, sample) -> None:
    """Score a sample as a run does. An error that ends a run is a finding."""
    from plasmid.components.reward_calls import call_reward
    from plasmid.errors import RewardError

    try:
        (score,) = await call_reward(judge, prompt, [sample], where="rewards.0", start=asyncio.ensure_future)
    except RewardError as error:
        raise Finding(f"a sample ends the run: {error}") from error
    if not math.isfinite(score.value) or not all(map(math.isfinite, score.components.values())):
        raise Finding(f"a score is {score!r:.200}")


def answers() -> list[bytes]:
    texts = (
        *(r"So \boxed{\frac{1}{2}}.", r"\boxed{1 1/2 \text{ cm}^2}", r"\boxed{x^2+\sqrt[3]{2}}", r"\boxed{50\%}"),
        *(r"\boxed{\left\{1, 2, \pi\right\}}", r"\boxed{(1, \infty)}", r"\boxed{12_{5}}", r"\boxed{1{,}000{,}000}"),
        *(
            "Answer: 0.5",
            "Answer: $\\frac{1}{2}$ dollars",
            "<think>x</think> the answer is (B).",
            "A, B or C",
            "#### 12",
        ),
        *("The answer is 'B'", "<answer>C</answer>", "B is correct", "It is 1,234.50 in all", "-7 and +3/4 and 1e3"),
        r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}",
    )
    return [text.encode() for text in texts]


def check_boxes(data: bytes) -> None:
    from plasmid_rewards.mathematics.boxed_text import find_last_boxed, remove_boxes, strip_thinking

    text = mutations.decoded(data)
    for read in (find_last_boxed, remove_boxes, strip_thinking):
        read(text)


# Servers


@contextlib.contextmanager
def running() -> Iterator[Callable]:
    """Run an event loop. Unhandled errors in it are findings."""
    errors: list[str] = []
    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: errors.append(f"{context!r:.500}"))

        def run(work):
            errors.clear()
            result = runner.run(work)
            if errors:
                raise Finding(f"an error in the event loop that nobody handles: {errors[0]}")
            return result

        yield run


def server_of(make: Callable) -> Callable:
    """Return a target for the answers of a server: the input is every byte that it sends."""

    @contextlib.contextmanager
    def opened() -> Iterator[Check]:
        answer = b""

        async def serve(reader, writer):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                writer.write(answer)
                await writer.drain()
            writer.close()

        with running() as run:
            server = run(asyncio.start_server(serve, "127.0.0.1", 0))
            ask, close = make(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

            def check(data: bytes) -> None:
                nonlocal answer
                answer = data
                run(ask())

            try:
                yield check
            finally:
                run(close())
                server.close()

    return opened


ASKED = {"attempts": 1, "request_timeout_s": 5.0, "breaker_failures": 10**9}


def reward_server(kind: str, **settings) -> Callable:
    def make(url: str):
        from plasmid.config.load import validate
        from plasmid.plugins.registry import find_components, load_plugins
        from plasmid.testing.rewards import make_prompt, make_sample

        given = {"kind": kind, "url": url, "on_failure": "value", "server": ASKED, **settings}
        judge = validate(find_components(load_plugins())["rewards"][kind], given)
        return lambda: scored(judge, make_prompt("1+1", target="2"), make_sample("2")), judge.close

    return server_of(make)


def engine_server(module: str, api: str) -> Callable:
    def make(url: str):
        import numpy as np
        from plasmid.config.load import validate
        from plasmid.config.run import ModelConfig
        from plasmid.types import GenerateRequest, SamplingParams
        from plasmid_models.testing import make_tiny_tokenizer
        from plasmid_serving.remote.client import ServerClient
        from plasmid_serving.remote.settings import Server

        settings = validate(Server, {"kind": "server", "url": url, "attempts": 1})
        model = ModelConfig(path=str(make_tiny_tokenizer(Path("model"))))
        client = ServerClient(settings, model, served="m", api=getattr(importlib.import_module(module), api)())
        request = GenerateRequest(
            id="1",
            session_id="1",
            token_ids=np.array([8, 9], np.int32),
            sampling=SamplingParams(max_new_tokens=8),
            seed=1,
            deadline_s=5.0,
        )

        async def ask() -> None:
            completion = await client.generate(request)
            if len(completion.token_ids) != len(completion.logprobs) or len(completion.token_ids) > 32:
                raise Finding(f"a completion has {len(completion.token_ids)} tokens")
            if completion.error is not None and len(completion.error) > 2000:
                raise Finding("an error has more than 2000 characters")

        return ask, client.disconnect

    return server_of(make)


def teacher_server(module: str, api: str) -> Callable:
    def make(url: str):
        import numpy as np
        from plasmid.config.load import validate
        from plasmid.config.run import ModelConfig
        from plasmid.errors import EngineError
        from plasmid_serving.remote.settings import ServerTeacher
        from plasmid_serving.remote.teacher import TeacherServer

        settings = validate(ServerTeacher, {"kind": "server", "url": url, "attempts": 1})
        model = ModelConfig(path="model")
        server_api = getattr(importlib.import_module(module), api)()
        client = TeacherServer(settings, model, served="m", api=server_api, top=None)

        async def ask() -> None:
            try:
                values = await client.score(np.array([7, 8, 9], np.int32), first=1, deadline_s=5.0)
            except EngineError as error:
                if len(str(error)) > 2000 or "\n" in str(error):
                    raise Finding(f"an error of {len(str(error))} characters: {str(error)[:200]!r}") from None
            else:
                if values.shape != (2,) or not ((values <= 0) & (values >= -1e4)).all():
                    raise Finding(f"log-probabilities {values}")

        return ask, client.disconnect

    return server_of(make)


def http(*values, head: str = "HTTP/1.1 200 OK\r\nContent-Type: application/json") -> list[bytes]:
    """Return HTTP messages with these values as JSON."""
    bodies = [json.dumps(value).encode() for value in values]
    return [f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]


def chat(text: str) -> dict:
    return {"id": "1", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], "usage": {"n": 1}}


def completion_answers() -> list[bytes]:
    drawn = {"text": "12", "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, None]}}
    return http({"choices": [drawn]}, {"choices": [{**drawn, "token_ids": [8, 9], "finish_reason": "length"}]})


def sglang_answers() -> list[bytes]:
    reasons = ({"type": "stop", "matched": 2}, {"type": "length", "length": 2}, {"type": "abort", "message": "gone"})
    drawn = [[-0.5, 8, None], [-1.5, 9, "x"]]
    return http(*({"text": "12", "meta_info": {"finish_reason": r, "output_token_logprobs": drawn}} for r in reasons))


def completion_scores() -> list[bytes]:
    rows = [None, {"8": {"logprob": -0.5, "rank": 1, "decoded_token": "1"}}, {"9": {"logprob": -1.5}, "7": None}]
    return http({"choices": [{"text": "x", "prompt_logprobs": rows}]}, {"choices": [{}], "prompt_logprobs": rows})


def sglang_scores() -> list[bytes]:
    rows = [[None, 7, None], [-0.5, 8, None], [-1.5, 9, "x"]]
    return http({"text": "", "meta_info": {"input_token_logprobs": rows, "prompt_tokens": 3}})


KEY = b"0123456789abcdef0123456789abcdef"
"""Placeholder for the key of the session in requests."""


@contextlib.contextmanager
def agent_endpoint() -> Iterator[Check]:
    """The server that agents call. The input is every byte of a connection; afterwards it must still answer."""
    from plasmid_agents.server import AgentServer
    from plasmid_agents.session import Session
    from plasmid_models.tokenization.tokenizer import Tokenizer

    sys.path.insert(0, str(TOP / "tests/agents"))
    cases = importlib.import_module("agent_cases")
    sys.path.pop(0)
    tokenizer = Tokenizer(cases.make_chat_tokenizer(Path("model")))
    server = AgentServer(host="127.0.0.1", advertised="127.0.0.1")
    count = 0

    async def ask(data: bytes) -> bytes:
        session = Session(cases.make_rollout(tokenizer, lambda text: "hello"), cases.make_settings())
        try:
            with server.serve_session(session) as (url, key):
                port = int(url.rsplit(":", 1)[1].partition("/")[0])
                answer = await exchange(port, data.replace(KEY, key.encode()))
                if session.error is not None:
                    raise Finding(f"a request ends the rollout: {session.error}")
                return answer
        finally:
            await session.close()

    with running() as run:
        run(server.start())

        def check(data: bytes) -> None:
            nonlocal count
            answer, count = run(ask(data)), count + 1
            if answer.startswith(b"HTTP/1.1 500"):
                raise Finding(f"status 500: {answer[-300:]!r}")
            valid = agent_requests()[0]
            if (data == valid or count % 50 == 0) and not run(ask(valid)).startswith(b"HTTP/1.1 200"):
                raise Finding("a valid request is not answered any more")

        try:
            yield check
        finally:
            run(server.close())


async def exchange(port: int, data: bytes) -> bytes:
    """Return the answer of a server; waits for it only if the request looks complete."""
    head, mark, body = data.partition(b"\r\n\r\n")
    lengths = [line[15:].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    is_whole = bool(mark) and len(lengths) == 1 and lengths[0].isdigit() and len(body) >= int(lengths[0][:9])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(data)
        async with asyncio.timeout(5.0 if is_whole else 0.05):
            answer = await reader.read(1 << 16)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return answer


def agent_requests() -> list[bytes]:
    user = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    bodies = {
        "chat/completions": {"model": "m", "max_tokens": 9, "temperature": 1.0, "messages": user, "tools": [tool]},
        "completions": {"model": "m", "prompt": "hi", "max_tokens": 5, "stop": ["x"], "stream": False},
        "messages": {"model": "m", "max_tokens": 9, "system": "s", "messages": parts, "stream": True},
        "messages/count_tokens": {"model": "m", "messages": parts},
    }
    requests = []
    for path, body in bodies.items():
        in_url = f"POST /{KEY.decode()}/v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        in_head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY.decode()}"
        requests += http(body, head=in_url) + http(body, head=in_head)
    return requests


RUN = ("plasmid_cli.main", "plasmid.config.load", "plasmid_runtime.plugin", "plasmid_fsdp.plugin", "plasmid_hf.plugin")
WEB = ("httpx", "plasmid_rewards", "plasmid.testing.rewards", "plasmid_runtime.plugin")
TORCH = (
    "torch.distributed.checkpoint",
    "safetensors.torch",
    "plasmid_runtime.plugin",
    "plasmid_convert.distributed.files",
)
TEXT = mutations.text_of
PARSER_TARGETS: dict[str, Target] = {
    "toml": Target(
        share=9000, examples=recipes, mutate=mutations.toml_of, opened=lambda: plain(check_toml), modules=RUN
    ),
    "override": Target(
        share=7000,
        examples=lambda: [text.encode() for text in OVERRIDES],
        mutate=TEXT,
        opened=lambda: plain(check_override),
        modules=RUN,
    ),
    "recipe": Target(
        share=1500,
        examples=resolved_recipes,
        mutate=mutations.toml_of,
        opened=lambda: plain(check_recipe),
        modules=RUN,
    ),
    "command": Target(
        share=500,
        examples=lambda: [b"run.seed=3\nrun.batches=1", b"sampling.temperature=0.5"],
        mutate=TEXT,
        opened=lambda: plain(check_command),
        modules=RUN,
    ),
    "jsonl": Target(
        share=9000,
        examples=jsonl_files,
        mutate=mutations.lines_of,
        opened=lambda: plain(check_rows("rows.jsonl")),
        modules=RUN,
    ),
    "parquet": Target(
        share=5000,
        examples=parquet_files,
        mutate=mutations.bytes_of,
        opened=lambda: plain(check_rows("rows.parquet")),
        modules=(*RUN, "pyarrow.parquet"),
    ),
    "gguf": Target(
        share=4000,
        examples=gguf_files,
        mutate=mutations.bytes_of,
        opened=lambda: plain(check_gguf),
        modules=(*TORCH, "gguf", "tokenizers"),
    ),
    "safetensors": Target(
        share=5000,
        examples=safetensors_files,
        mutate=mutations.safetensors_of,
        opened=lambda: plain(check_weights("w.safetensors")),
        modules=TORCH,
    ),
    "weight-index": Target(
        share=3000,
        examples=lambda: [json.dumps({"weight_map": {"a": "w.safetensors", "b": "w.safetensors"}}).encode()],
        mutate=mutations.json_of,
        opened=lambda: plain(check_weights("model.safetensors.index.json")),
        modules=TORCH,
    ),
    "metadata": Target(
        share=4000, examples=metadata_files, mutate=mutations.pickle_of, opened=distributed_folder, modules=TORCH
    ),
    "megatron-common": Target(
        share=2500,
        examples=common_files,
        mutate=mutations.bytes_of,
        opened=megatron_state,
        modules=(*TORCH, "plasmid_megatron.checkpoint.state"),
        reserves_memory=True,  # torch's reader for its older format without archives
    ),
    "state": Target(
        share=1500, examples=states, mutate=mutations.json_of, opened=lambda: plain(check_state), modules=RUN
    ),
    "tool-calls": Target(
        share=14000,
        examples=tool_calls,
        mutate=TEXT,
        opened=lambda: plain(check_tool_calls),
        modules=("plasmid_workflows.tools.tool_calls",),
    ),
    "boxes": Target(
        share=4000, examples=answers, mutate=TEXT, opened=lambda: plain(check_boxes), modules=("plasmid_rewards",)
    ),
    "reward-number": Target(share=5000, examples=answers, mutate=TEXT, opened=reward("number"), modules=WEB),
    "reward-dapo": Target(share=6000, examples=answers, mutate=TEXT, opened=reward("dapo"), modules=WEB),
    "reward-gpqa": Target(share=6000, examples=answers, mutate=TEXT, opened=reward("gpqa"), modules=WEB),
    "reward-math": Target(
        share=1500,
        examples=answers,
        mutate=TEXT,
        opened=reward("math", workers=1, call_timeout_s=2.0, memory_mb=512),
        modules=WEB,
        starts_processes=True,
    ),
    "server-remote": Target(
        share=2500,
        examples=lambda: http({"score": 0.5, "length": 3, "why": "x"}, {"score": 1}),
        mutate=mutations.http_of,
        opened=reward_server("remote", key="score"),
        modules=WEB,
    ),
    "server-judge": Target(
        share=2000,
        examples=lambda: http(chat("Fine.\nScore: 7"), chat("**Score: 4/10**")),
        mutate=mutations.http_of,
        opened=reward_server("judge", model="m", cache_size=0),
        modules=WEB,
    ),
    "server-completions": Target(
        share=2000,
        examples=completion_answers,
        mutate=mutations.http_of,
        opened=engine_server("plasmid_serving.remote.apis", "CompletionsApi"),
        modules=(*WEB, "plasmid_models.tokenization.tokenizer", "tokenizers", "plasmid_serving.remote.client"),
    ),
    "server-sglang": Target(
        share=2000,
        examples=sglang_answers,
        mutate=mutations.http_of,
        opened=engine_server("plasmid_sglang.generate_api", "GenerateApi"),
        modules=(*WEB, "tokenizers", "plasmid_sglang.generate_api", "plasmid_serving.remote.client"),
    ),
    "teacher-completions": Target(
        share=1500,
        examples=completion_scores,
        mutate=mutations.http_of,
        opened=teacher_server("plasmid_serving.remote.apis", "CompletionsApi"),
        modules=(*WEB, "tokenizers", "plasmid_serving.remote.teacher"),
    ),
    "teacher-sglang": Target(
        share=1500,
        examples=sglang_scores,
        mutate=mutations.http_of,
        opened=teacher_server("plasmid_sglang.generate_api", "GenerateApi"),
        modules=(*WEB, "tokenizers", "plasmid_sglang.generate_api", "plasmid_serving.remote.teacher"),
    ),
    "agent": Target(
        share=3000,
        examples=agent_requests,
        mutate=mutations.http_of,
        opened=agent_endpoint,
        starts_processes=True,  # the process that renders chat templates
        modules=(
            "plasmid_agents.server",
            "plasmid_agents.session",
            "plasmid_models.tokenization.tokenizer",
            "plasmid_workflows.execution",
        ),
    ),
}
