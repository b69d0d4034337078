"""Write a Qwen3 model with random weights and a character tokenizer, for benchmarks without network access.

    python benchmarks/random_qwen3.py 0.6b models/qwen3-0.6b-random

The shape `30b-a3b` is a mixture of experts. `30b-a3b-dense` has the same layers, with an MLP of the size that is active
for each token. `--layers` writes fewer layers than the 48 of the whole model.
"""

import argparse
from pathlib import Path

from plasmid_models.testing import make_tiny_model

SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_layers": 28, "num_attention_heads": 16, "tied": True},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_layers": 28, "num_attention_heads": 16, "tied": True},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_layers": 36, "num_attention_heads": 32, "tied": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36, "num_attention_heads": 32, "tied": False},
}
A3B = {"hidden_size": 2048, "num_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "tied": False}
SHAPES["30b-a3b-dense"] = A3B | {"intermediate_size": 8 * 768}
SHAPES["30b-a3b"] = A3B | {
    "family": "qwen3_moe",
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
COMMON = {
    "family": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="number of layers; by default that of the shape")
    parser.add_argument("--device", default="cpu", help="device for sampling the weights; a GPU takes seconds for 4B")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    made = {"device": arguments.device, "dtype": arguments.dtype}
    shape = COMMON | SHAPES[arguments.shape] | ({"num_layers": arguments.layers} if arguments.layers else {})
    print(make_tiny_model(arguments.folder, **made, **shape))
