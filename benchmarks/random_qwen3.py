"""Write a Qwen3 of its real shape with random weights and a tokenizer of characters, for benchmarks without a network.

python benchmarks/random_qwen3.py 0.6b models/qwen3-0.6b-random
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
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.folder, **COMMON, **SHAPES[arguments.shape]))
