"""A real SGLang server as the teacher."""

import numpy as np
import pytest
import torch
from plasmid.config.load import merge, resolve
from plasmid.errors import EngineError
from plasmid_models.testing import make_tiny_tokenizer
from sgl_cases import make_context, plain_model

TOKENS = np.array([7, 9, 12, 8, 30, 11, 10, 7, 9, 12], np.int32)


def taught(shared, tmp_path, own, *, algorithm=None, **model):
    settings = shared.as_external(own)
    data = make_context(shared.model_path, tmp_path).config.model_dump(mode="json")
    teacher = {"kind": "server", "url": settings["urls"][0], "api_key_env": settings["api_key_env"]}
    changes = {"teacher": teacher, "algorithm": algorithm or {"kind": "opd"}, "rewards": [], "model": model}
    return resolve(merge(data, changes))


@pytest.mark.parametrize("first", [1, 4, 9])
def test_teacher_scores_match_transformers(shared, tmp_path, first):
    async def test():
        async with shared.engine() as own:
            config = taught(shared, tmp_path, own)
            client = await config.teacher.connect(config)
            try:
                found = [await client.score(TOKENS, first=first, deadline_s=60.0) for _ in range(2)]
            finally:
                await client.disconnect()
            return found

    found, again = shared.run(test())  # the second time, the server has the tokens in its cache
    with torch.no_grad():
        logits = plain_model(shared.model_path)(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0]
    wanted = logits.double().log_softmax(-1)[torch.arange(9), torch.from_numpy(TOKENS[1:].astype(np.int64))]
    np.testing.assert_allclose(found, wanted[first - 1 :], atol=2e-5)
    np.testing.assert_allclose(again, wanted[first - 1 :], atol=2e-5)


@pytest.mark.parametrize("first", [1, 4, 9])
def test_teacher_top_tokens_match_transformers(shared, tmp_path, first):
    async def test():
        async with shared.engine() as own:
            config = taught(shared, tmp_path, own, algorithm={"kind": "gkd", "top_k": 5})
            client = await config.teacher.connect(config)
            try:
                return [await client.score_top(TOKENS, first=first, deadline_s=60.0) for _ in range(2)]
            finally:
                await client.disconnect()

    with torch.no_grad():
        logits = plain_model(shared.model_path)(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0]
    wanted = logits.double().log_softmax(-1)[first - 1 : -1].topk(5, dim=-1)
    for found in shared.run(test()):  # the second time, the server has the tokens in its cache
        order = np.argsort(-found.logprobs, 1)
        np.testing.assert_array_equal(np.take_along_axis(found.token_ids, order, 1), wanted.indices)
        np.testing.assert_allclose(np.take_along_axis(found.logprobs, order, 1), wanted.values, atol=2e-5)


def test_another_tokenizer_is_refused(shared, tmp_path):
    other = make_tiny_tokenizer(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"1": 8', '"1": 9').replace('"2": 9', '"2": 8'))

    async def test():
        async with shared.engine() as own:
            config = taught(shared, tmp_path, own, tokenizer=str(other))
            await config.teacher.connect(config)

    with pytest.raises(EngineError, match=r"^teacher.url: the tokenizer of \S+ differs from the policy's"):
        shared.run(test())
