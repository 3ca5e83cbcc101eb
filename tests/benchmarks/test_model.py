"""The cost model's arithmetic, and how far it is from what others published."""

import model
import pytest
from model import Chip, Kernels

CHIP = Chip(launch=10e-6, floor=2e-6, bandwidth=1e12, matmul=1e14)


def test_host_and_device_overlap():
    small = [Kernels(100, 1e6)]  # 1 ms to launch, 0.2 ms of floors
    assert model.host_time(small, CHIP) == pytest.approx(1e-3)
    assert model.device_time(small, CHIP) == pytest.approx(0.2e-3)
    assert model.step_time(small, CHIP) == pytest.approx(1e-3)
    large = [Kernels(1, 5e9), Kernels(1, 0, operations=3e11)]
    assert model.step_time(large, CHIP) == pytest.approx(5e-3 + 3e-3)


def test_layers_add_up():
    one = {"mm": Kernels(7, 70), "embedding": Kernels(1, 5)}
    two = {"mm": Kernels(13, 130), "embedding": Kernels(1, 5)}
    assert model.whole_model(one, two, 28) == {"mm": Kernels(7 + 6 * 27, 70 + 60 * 27), "embedding": Kernels(1, 5)}


def test_every_parameter_has_a_source():
    assert set(model.PARAMETERS) == set(Chip.__dataclass_fields__)
    assert all("://" in text or "#" in text or "ascend" in text for text in model.PARAMETERS.values())


def test_kernels_larger_than_the_cache_agree_with_published_times():
    """Within 2 %: the bandwidth was taken from one of the two, the other is of another shape."""
    for elements, seconds in model.SWIGLU[-2:]:
        assert model.device_time([Kernels(1, 3 * elements)], Chip()) == pytest.approx(seconds, rel=0.02)


def test_launch_bound_pairs_agree_with_published_times():
    """Within 15 %: 12 µs is the difference of the two measurements, each also has what a call costs by itself.

    512 tokens are left out: their tensors fit the cache, which the model does not have.
    """
    for tokens, both, fused in model.NORM_AND_CAST[:2]:
        size = tokens * 7168 * 2
        assert model.step_time([Kernels(1, 2 * size), Kernels(1, 3 * size)], Chip()) == pytest.approx(both, rel=0.15)
        assert model.step_time([Kernels(1, 3 * size)], Chip()) == pytest.approx(fused, rel=0.15)


def test_matmul_operations_of_a_step():
    """Three products of every weight of 28 layers and two of the head, two operations each: 6 * 6.5e9 + 4 * 0.54e9 a token."""
    assert model.matmul_operations(1) == pytest.approx(6 * 6.53e9 + 4 * 0.545e9, rel=0.01)
