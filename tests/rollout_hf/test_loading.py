"""Several engines of one process read their models at the same time."""

from concurrent.futures import ThreadPoolExecutor

import torch
from plasmid.testing.tiny import make_tiny_model
from plasmid_hf.model import load_model


def test_models_that_threads_load_at_once_are_whole_and_keep_their_precision(tmp_path):
    path = make_tiny_model(tmp_path / "model", tied=True)
    kinds = [torch.float32, torch.bfloat16] * 20

    def load(dtype):
        return load_model(path, dtype=dtype, device=torch.device("cpu"), trust_remote_code=False)

    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(load, kinds))
    assert [model.hf.lm_head.weight.dtype for model in models] == kinds
    assert all(model.hf.lm_head.weight is model.hf.get_input_embeddings().weight for model in models)
    assert torch.get_default_dtype() == torch.float32
