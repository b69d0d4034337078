"""Joining clusters with and without token authentication."""

import pytest

TOKEN = "0123456789abcdef" * 4
SHORT = ("placement.nodes=2", "placement.wait_timeout_s=1")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cluster_with_a_token_can_only_be_joined_with_the_token(cluster_of, job, tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with cluster_of({"num_cpus": 8}, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as cluster:
        plain = {name: value for name, value in cluster.environment.items() if name != "RAY_AUTH_MODE"}
        code, out = job.train(environment={**plain, "HOME": str(tmp_path)})
        assert code == 2, out
        assert "it requires a token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or write it to ~/.ray/auth_token" in out
        code, out = job.train(environment={**plain, "RAY_AUTH_TOKEN_PATH": str(file)})
    assert code == 0 and "batch 2/2" in out, out
    assert "without authentication" not in out


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cluster_without_authentication_can_only_be_joined_without_a_token(cluster_of, job, tmp_path):
    """With a token, Ray's control process, whose requests have none, would end each process of the run."""
    file = tmp_path / ".ray/auth_token"
    file.parent.mkdir()
    file.write_text(TOKEN)
    with cluster_of({"num_cpus": 3}) as cluster:
        plain = {name: value for name, value in cluster.environment.items() if name != "RAY_AUTH_MODE"}
        for token in ({"HOME": str(tmp_path)}, {"RAY_AUTH_TOKEN": TOKEN}, {"RAY_AUTH_TOKEN_PATH": str(file)}):
            code, out = job.train(*SHORT, environment={**plain, **token})
            (error,) = (line for line in out.splitlines() if line.startswith("error: "))
            assert code == 2 and "runs without authentication, but this process uses a token" in error, out
        code, out = job.train(*SHORT, environment={**plain, **token, "RAY_AUTH_MODE": "disabled"})
    assert code == 75 and "did not provide the resources of the run" in out, out
    assert out.count(f"the Ray cluster at {cluster.address} runs without authentication") == 1, out
