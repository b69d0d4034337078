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
def test_a_cluster_without_authentication_is_named_also_to_those_who_have_a_token(cluster_of, job):
    with cluster_of({"num_cpus": 3}) as cluster:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        code, out = job.train(*SHORT, environment={**cluster.environment, **token})
    assert code == 75 and "did not provide the resources of the run" in out, out
    assert out.count(f"the Ray cluster at {cluster.address} runs without authentication") == 1, out
