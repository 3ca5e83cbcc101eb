import pytest
from kernels import get_kernel

npu = get_kernel("org/npu-fusion", version=1)


@pytest.fixture
def fuse():
    """`kernelize`, undone after the test: a rotary function is shared by all models of a file."""
    models = []

    def kernelize(model, **options):
        models.append(model)
        return npu.kernelize(model, **options)

    yield kernelize
    for model in models:
        npu.restore(model)


@pytest.fixture
def registered():
    """`register()`, undone after the test; what was swapped meanwhile is the test's to restore."""
    npu.register()
    yield npu
    npu.unregister()
