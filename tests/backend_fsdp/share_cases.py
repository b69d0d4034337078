"""A wire that writes files, and the tensors received over it from several ranks."""

from dataclasses import dataclass

import torch
from plasmid.types import BucketSum, SyncResult
from plasmid_models.sync import compare, unpack
from plasmid_models.sync.checksum import checksum


@dataclass
class FolderWire:
    """Writes every bucket to a file."""

    folder: str
    senders: str = "first"
    fails: bool = False

    def open(self, *, rank, version):
        return FolderSender(f"{self.folder}/{version}-{rank}", self.fails)


@dataclass
class FolderSender:
    prefix: str
    fails: bool

    def send(self, bucket):
        if self.fails and bucket.index == 1:
            raise ConnectionError("wire cut")
        torch.save(bucket, f"{self.prefix}-{bucket.index:03d}.pt")

    def close(self, *, ok):
        with open(f"{self.prefix}-closed", "w") as file:
            file.write(str(ok))


def receive(folder, version, rank):
    """Return the tensors by name, and the receiver's result."""
    buckets = [torch.load(f, weights_only=False) for f in sorted(folder.glob(f"{version}-{rank}-*.pt"))]
    tensors = dict(pair for bucket in buckets for pair in unpack(bucket))
    sums = tuple(BucketSum(index=b.index, num_bytes=b.data.numel(), checksum=checksum(b.data)) for b in buckets)
    return tensors, SyncResult(version=version, num_tensors=len(tensors), buckets=sums)


def check_shares(sent, folder, version, weights, *, num_ranks):
    """Check that every rank sent a share, and that together they sent every weight once, bit by bit."""
    shares = [receive(folder, version, rank) for rank in range(num_ranks)]
    names = [name for tensors, _ in shares for name in tensors]
    assert len(names) == len(set(names)) and set(names) == weights.keys()
    assert all(torch.equal(t, weights[n]) and t.dtype == weights[n].dtype for own, _ in shares for n, t in own.items())
    largest = max(tensor.nbytes for tensor in weights.values())
    sizes = [result.num_bytes for _, result in shares]
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= largest, sizes
    buckets = sorted((bucket for _, result in shares for bucket in result.buckets), key=lambda bucket: bucket.index)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    compare(sent, SyncResult(version=version, num_tensors=len(weights), buckets=tuple(buckets)))
