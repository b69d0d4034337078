"""A server that hangs: the stacks of its processes are saved in the run folder before it is restarted."""

import pytest

from tests.stopped_process import hang_report_of


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_stopped_scheduler_is_named_with_the_stacks_of_its_server(sglang, tiny_model, tmp_path):
    rollout = "kind='sglang', dtype='float32', server_args={max_total_tokens=4096}"
    report = hang_report_of(tmp_path, tiny_model, rollout, "sglang::scheduler")
    text = report.read_text()
    assert "  engine-0/sglang::scheduler (process " in text and "): stopped by a signal; " in text
    assert "_watchdog" not in text
    for name, function in (("scheduler", "in event_loop"), ("detokenizer", "in event_loop"), ("python", "in serve")):
        (file,) = report.parent.glob(f"engine-0-*{name}*.txt")
        assert function in file.read_text(), name
