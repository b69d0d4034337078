"""Built-in data sources satisfy `check_data_source`, and sources that break a promise are found."""

import random
from typing import Literal

import pytest
from plasmid import DataSource, Prompt
from plasmid.components import DataFacts, PromptStream
from plasmid.errors import DataError
from plasmid.testing.source_contracts import check_data_source, encode_bytes
from plasmid_runtime.data.curriculum import Curriculum
from plasmid_runtime.data.files import Files
from plasmid_runtime.data.function import Function
from plasmid_runtime.data.mixture import Mixture


@pytest.fixture
def files(sums):
    return Files(path=str(sums))


def test_files_satisfy_the_contract(files):
    check_data_source(files)
    check_data_source(files.model_copy(update={"epochs": 1}), draws=15)


def test_generated_rows_satisfy_the_contract(tmp_path):
    (tmp_path / "rows.py").write_text(
        "def row(*, seed, index):\n    return {'prompt': f'{seed} {index}', 'target': index}\n"
    )
    check_data_source(Function(function=f"{tmp_path}/rows.py:row"))


def test_mixtures_and_curricula_satisfy_the_contract(files):
    check_data_source(Mixture(sources={"a": files, "b": files}))
    check_data_source(Curriculum(source=files))


class Lines(DataSource):
    """Ten prompts, with one fault."""

    kind: Literal["lines"] = "lines"
    fault: str = ""

    def stream(self, encode, *, seed):
        return LineStream(self.fault, encode, seed)

    def prompts(self, encode):
        if self.fault == "no-evaluation":
            raise DataError("endless")
        stream = LineStream("", encode, 0)
        again = [stream.prompt("line:0")] if self.fault == "twice" else []
        return [*again, *iter(stream.draw, None)]


class LineStream(PromptStream):
    def __init__(self, fault, encode, seed):
        self.fault, self.encode, self.next = fault, encode, 0
        self.random = random.random() if fault == "random" else seed

    def draw(self):
        if self.next == 10:
            return None
        self.next += 1
        return self.prompt(f"line:{self.next - 1}", drawn=True)

    def prompt(self, id, *, drawn=False):
        number = "?" if self.fault == "other" and not drawn else id
        tokens, text = self.encode(f"{self.random} {number}", {})
        return Prompt(
            id="" if self.fault == "no-id" else id, token_ids=tokens[: 0 if self.fault == "empty" else None], text=text
        )

    def state(self):
        return {"next": {self.next} if self.fault == "no-json" else self.next}

    def restore(self, state):
        self.next = 0 if self.fault == "forgets" else state["next"] + (self.fault == "skips")
        self.state = (lambda: dict(state)) if self.fault == "skips" else self.state

    def facts(self):
        return DataFacts(num_draws=None if self.fault == "endless" else 10)

    def metrics(self):
        return {"rows": 1.0} if self.fault == "metrics" else {}


@pytest.mark.parametrize("fault", ["", "no-evaluation"])
def test_a_source_without_faults_passes(fault):
    check_data_source(Lines(fault=fault))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("random", "a second stream with the same seed must yield the same prompts: token_ids of line:0 differs"),
        ("other", "prompt must yield the same prompts: token_ids of line:0 differs"),
        ("no-id", "the id of a prompt must be a text, got ''"),
        ("empty", "line:0 must have at least one token"),
        ("no-json", "state must return JSON types"),
        ("forgets", "state must return what restore received"),
        ("skips", r"a stream after restore must yield the same prompts: expected \['line:5'"),
        ("endless", "facts must return the number of draws of a source that ends: it ended after 10 draws"),
        ("metrics", "names of metrics must start with data/, got {'rows': 1.0}"),
        ("twice", "prompts must yield each prompt once"),
    ],
)
def test_a_source_that_breaks_a_promise_is_found(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_data_source(Lines(fault=fault))


def test_prompts_are_encoded_as_bytes():
    tokens, text = encode_bytes([{"role": "user", "content": "h\xe9"}], {})
    assert text == "user: h\xe9\n" and bytes(tokens.tolist()).decode() == text
    assert len(encode_bytes("ab", {}, tokenize=False)[0]) == 0
