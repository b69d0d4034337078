"""A server that hangs: the stacks of its processes are saved in the run folder before it is restarted."""

import pytest

from tests.stopped_process import hang_report_of


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_stopped_scheduler_is_named_with_the_stacks_of_its_server(vllm_python, wide_model, tmp_path):
    rollout = f"kind='vllm', python='{vllm_python}', dtype='float32', server_args={{kv_cache_memory_bytes={64 << 20}}}"
    report = hang_report_of(tmp_path, wide_model, rollout, "VLLM::EngineCore")
    text = report.read_text()
    assert "  engine-0/VLLM::EngineCore (process " in text and "): stopped by a signal; " in text
