"""A weight sync that failed on every server: which failures are retried, and which end the run."""

from plasmid.errors import ActorDiedError, EngineError, EngineLostError, SyncError
from plasmid_serving.weights.errors import SyncAbortedError, sync_failure


def test_servers_that_went_away_are_waited_for():
    error = sync_failure([EngineError("connection refused"), ActorDiedError("engine-1 ended")])
    assert isinstance(error, EngineLostError)
    assert str(error) == "EngineError: connection refused; ActorDiedError: engine-1 ended"
    assert str(sync_failure([])) == "no server is running"


def test_a_proof_that_failed_is_never_tried_again():
    proof = SyncError("bucket 1 has another checksum")
    assert sync_failure([EngineError("connection refused"), proof]) is proof


def test_a_server_that_another_one_cut_off_proves_nothing():
    cut_off = SyncAbortedError("the broadcast failed")
    assert isinstance(sync_failure([cut_off, EngineError("connection refused")]), EngineLostError)
    assert sync_failure([cut_off]) is cut_off  # no server has ended: a retry would fail in the same way
    proof = SyncError("bucket 1 has another checksum")
    assert sync_failure([cut_off, EngineError("connection refused"), proof]) is proof
