"""CI's selection of long tests: a twelfth of them in each run, all of them over time, and none without the mark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def chosen(folder: Path, seed: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "long_sample", f"--long-sample={seed}"]
    env = os.environ | {"PYTHONPATH": str(ROOT / ".ci")}
    done = subprocess.run(
        [*command, "-c", "pytest.ini", "."], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.long
def test_seeds_select_a_twelfth_of_the_long_tests(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    long: x\n    gpu: x\naddopts = -m 'not long'\n")
    body = "".join(f"@pytest.mark.long\ndef test_long_{i}(): pass\n" for i in range(13))
    body += "def test_short(): pass\n@pytest.mark.long\n@pytest.mark.gpu\ndef test_gpu(): pass\n"
    (tmp_path / "test_x.py").write_text("import pytest\n" + body)
    samples = [chosen(tmp_path, seed) for seed in ("a", "a", "b", "c", "d", "e", "f", "g")]
    assert samples[0] == samples[1]
    assert all(len(sample) == 2 for sample in samples)
    assert len({frozenset(sample) for sample in samples}) > 1
    assert all("test_long_" in name for sample in samples for name in sample)
