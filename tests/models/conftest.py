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


@pytest.fixture(autouse=True)
def unregistered():
    """No test sees what another registered or named; models that it swapped are its own to restore."""
    yield
    npu.unregister()


@pytest.fixture
def registered():
    npu.register()
    return npu
