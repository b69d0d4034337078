"""A program that runs a Ray cluster of several nodes on this machine. Prints its address; ends when its input ends."""

import json
import sys

from ray.cluster_utils import Cluster


def main(nodes):
    cluster = Cluster()
    for node in nodes:
        cluster.add_node(**{"include_dashboard": False, **node})
    print(cluster.address, flush=True)
    for line in sys.stdin:  # each line adds a node
        cluster.add_node(**json.loads(line))
        print("added", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
