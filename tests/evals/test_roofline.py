import pytest
import torch

from quantkit import roofline
from quantkit.errors import UserError
from quantkit.roofline import Roofline


def test_measured_figures_are_physical():
    found = roofline.measure(seconds=0.05, size=64 << 20, dtypes=(torch.float32,))
    assert 0.2e9 < found.bandwidth < 2e12, found
    assert 0.5e9 < found.flops["float32"] < 1e14, found
    assert found.ridge["float32"] == found.flops["float32"] / found.bandwidth
    assert found.threads == torch.get_num_threads()


def test_a_rate_is_work_over_the_best_time(monkeypatch):
    monkeypatch.setattr(roofline, "_best_time", lambda work, seconds, name: 0.5)
    assert roofline.read_bandwidth(size=32768) == 32768 / 0.5
    assert roofline.matmul_rate(torch.float32, width=64) == 2 * 64**3 / 0.5


def test_best_time_is_the_shortest(monkeypatch):
    ticks = iter([0.0, 1.0, 4.0, 4.0, 5.0, 5.0, 7.0, 100.0])
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: next(ticks))
    assert roofline._best_time(lambda: None, 0.1, "cpu") == 1.0  # turns take 3, 1 and 2 seconds


def test_decode_prediction_by_hand():
    # 270 MB of weights, 23,040 bytes of cache a token, context 1000: 293.04 MB a step at 30 GB/s.
    step = roofline.bytes_per_step(270e6, 23040, 1000)
    assert step == 270e6 + 23.04e6
    assert roofline.decode_rate(30e9, step) == pytest.approx(102.37, abs=0.01)
    batch = roofline.bytes_per_step(270e6, 23040, 1000, batch=8)
    assert roofline.decode_rate(30e9, batch, batch=8) == pytest.approx(8 * 30e9 / (270e6 + 8 * 23.04e6))
    with pytest.raises(ValueError, match="must read something"):
        roofline.decode_rate(1e9, 0)


def test_prefill_and_bound():
    assert roofline.prefill_seconds(1e12, 135e6, 512) == pytest.approx(2 * 135e6 * 512 / 1e12)
    with pytest.raises(ValueError, match="not known"):
        roofline.prefill_seconds(0, 1, 1)
    roof = Roofline(bandwidth=10e9, flops={"float32": 100e9}, threads=2)
    # One token: 0.2 GFLOP take 2 ms, 400 MB take 40 ms. A thousand tokens: 2 s against 40 ms.
    assert roofline.bound_by(roof, 100e6, 400e6, 1) == "bandwidth"
    assert roofline.bound_by(roof, 100e6, 400e6, 1000) == "arithmetic"


def test_device_table():
    assert roofline.device("h200").memory == 141e9 and roofline.device("rtx 4090").name == "RTX-4090"
    with pytest.raises(UserError, match="did you mean 'H100-SXM'"):
        roofline.device("H100-SXN")
    for name, found in roofline.DEVICES.items():
        assert found.name == name and found.bandwidth > 1e10 and found.source, name
        assert found.memory == 0 or 8e9 <= found.memory < 1e12, name
