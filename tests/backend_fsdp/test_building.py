"""Models are built while other threads of the process load models."""

import threading
import time

import torch
from plasmid_fsdp.model.building import build_on_meta, materialize
from plasmid_fsdp.settings import FSDP
from plasmid_models.building import BUILD_LOCK
from plasmid_models.source import Source
from plasmid_models.testing import make_tiny_model
from transformers.initialization import no_tie_weights


def test_weights_are_tied_while_another_thread_loads_a_model(tmp_path):
    """While transformers loads a model, it replaces `tie_weights` of all models."""
    path = make_tiny_model(tmp_path / "model", family="qwen3", tied=True)
    source, settings = Source(where="model", path=path, trust_remote_code=False), FSDP(dtype="float32")
    model, loading = build_on_meta(source, settings), threading.Event()

    def load():
        with BUILD_LOCK, no_tie_weights():
            loading.set()
            time.sleep(0.5)

    other = threading.Thread(target=load)
    other.start()
    assert loading.wait(10)
    materialize(model, model, settings, device=torch.device("cpu"), source=source)
    other.join()
    assert model.lm_head.weight is model.model.embed_tokens.weight
