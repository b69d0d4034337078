"""Write a Qwen3 of its real shape with random weights and a tokenizer of characters, for benchmarks without a network.

python benchmarks/random_qwen3.py 0.6b models/qwen3-0.6b-random
"""

import argparse
from pathlib import Path

from plasmid.testing.tiny import make_tiny_model

SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144},
}
COMMON = {
    "family": "qwen3",
    "num_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tied": True,
    "initializer_range": 0.02,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(make_tiny_model(arguments.folder, **COMMON, **SHAPES[arguments.shape]))
