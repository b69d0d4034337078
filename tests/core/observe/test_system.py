import os
import subprocess
import sys
import time

from plasmid_runtime.observe import system
from plasmid_runtime.observe.system import SystemMonitor

MEASURE = system._pss
"""Tests of runs replace this function until their package's fixtures end."""
HOG = "import time; block = bytearray(200 << 20); print('ready', flush=True); time.sleep(60)"


def test_memory_counts_child_processes_and_remembers_a_peak_that_is_over(monkeypatch):
    monkeypatch.setattr(system, "_pss", MEASURE)
    monitor = SystemMonitor(interval_s=0.05, processes_interval_s=0, pss_interval_s=0)
    before = monitor.metrics()
    child = subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        during = monitor.metrics()
        time.sleep(0.5)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    after = monitor.metrics()
    monitor.close()
    assert during["memory/rss_gib"] - before["memory/rss_gib"] > 0.19
    assert during["memory/pss_gib"] - before["memory/pss_gib"] > 0.19
    assert during["memory/rss_gib"] - after["memory/rss_gib"] > 0.19
    assert after["memory/rss_peak_gib"] - after["memory/rss_gib"] > 0.19


def test_processes_that_are_not_children_are_counted_by_their_id():
    monitor = SystemMonitor(interval_s=10, pids=[os.getppid(), 999_999_999])
    alone = SystemMonitor(interval_s=10)
    try:
        assert len(monitor._processes()) > len(alone._processes())
    finally:
        monitor.close()
        alone.close()


def test_shared_pages_are_counted_again_only_after_their_interval(monkeypatch):
    counted = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(system, "_pss", lambda processes: next(counted) * system.GIB)
    for interval_s, expected in ((1000.0, [1.0, 1.0]), (0.0, [2.0, 3.0])):
        monitor = SystemMonitor(interval_s=10, pss_interval_s=interval_s)
        assert [monitor.metrics()["memory/pss_gib"] for _ in range(2)] == expected
        monitor.close()


def test_processes_are_listed_again_only_after_their_interval(monkeypatch):
    listed = []
    monkeypatch.setattr(system.psutil.Process, "children", lambda process, recursive: listed.append(process) or [])
    for interval_s, expected in ((1000.0, 1), (0.0, 3)):
        listed.clear()
        monitor = SystemMonitor(interval_s=10, processes_interval_s=interval_s)
        for _ in range(3):
            monitor.metrics()
        monitor.close()
        assert len(listed) == expected
