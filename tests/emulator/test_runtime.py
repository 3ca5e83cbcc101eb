"""The emulated runtime: how it starts, what torch_npu sees of the device, its memory, and how it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import npu_emulator
import pytest
import torch
from npu_emulator.launcher import LIBRARIES

pytestmark = pytest.mark.skipif(not npu_emulator.is_emulated(), reason="real hardware: nothing is emulated")

MIB = 2**20
OURS = ("NPU_EMULATOR_", "ASCEND_", "TASK_QUEUE_ENABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def python(code, **environment):
    """Run code in a fresh process, as on a machine where nobody has set anything up."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True, timeout=120
    )


def result(code, **environment):
    """What the code prints as JSON on its last line."""
    done = python(f"import npu_emulator, json; npu_emulator.start()\nimport torch\n{code}", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- the start


def test_import_is_light_and_start_is_idempotent():
    done = python("import npu_emulator, sys; print('torch' in sys.modules, npu_emulator.is_emulated())")
    assert done.stdout.split() == ["False", "False"]
    npu_emulator.start()
    assert npu_emulator.is_emulated() and torch.npu.is_available()


def test_counting_without_the_emulator_says_so():
    done = python("import npu_emulator\nwith npu_emulator.count(): pass")
    assert "RuntimeError: the NPU emulator is not running: call npu_emulator.start() first" in done.stderr


def test_torch_npu_imported_before_is_an_error():
    imported = "import sys, types; sys.modules['torch_npu'] = types.ModuleType('torch_npu')"
    done = python(f"{imported}\nimport npu_emulator; npu_emulator.start()")
    assert "RuntimeError: torch_npu is already imported: call npu_emulator.start() before" in done.stderr


def test_missing_libraries_name_the_command(tmp_path):
    (tmp_path / "npu_emulator").symlink_to(Path(npu_emulator.__file__).parent)
    code = (
        f"import npu_emulator.launcher as l, pathlib; l.LIBRARIES = pathlib.Path({str(tmp_path)!r}) / 'lib'; l.start()"
    )
    done = python(code)
    assert f"run: make -C {tmp_path} PYTHON={sys.executable}" in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NPU_EMULATOR_DEVICES", "0"),
        ("NPU_EMULATOR_DEVICES", "two"),
        ("NPU_EMULATOR_MEMORY", "8GB"),
        ("NPU_EMULATOR_MEMORY", "-1"),
    ],
)
def test_wrong_settings_are_named(name, value):
    done = python("import npu_emulator; npu_emulator.start()", **{name: value})
    assert f"RuntimeError: {name}={value!r}: expected" in done.stderr


def test_runtime_defines_every_symbol_that_torch_npu_links():
    """linked_symbols.txt is complete for the installed torch_npu, and what it lists is in libascendcl."""
    import torch_npu

    def symbols(path, *options):
        lines = subprocess.run(["nm", "-D", *options, str(path)], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1].split("@")[0] for line in lines.splitlines()}

    package = Path(torch_npu.__file__).parent
    libraries = [*package.glob("lib/lib*npu*.so"), package / "lib" / "libtensorpipe.so", *package.glob("_C*.so")]
    needed = {
        name
        for library in libraries
        for name in symbols(library, "--undefined-only")
        if name.startswith(("acl", "Msprof")) or (name.startswith("rt") and name[2].isupper())
    }
    listed = set((LIBRARIES.parent / "src" / "linked_symbols.txt").read_text().split())
    assert needed and needed <= listed
    assert listed <= symbols(LIBRARIES / "libascendcl.so", "--defined-only")


def test_settings_reach_torch_npu():
    seen = result(
        """
n, properties = torch.npu, torch.npu.get_device_properties(1)
rows = [n.device_count(), n.get_device_name(1), properties.name, properties.total_memory]
x = torch.arange(3, device="npu:1")
y = x.to("npu:0")
rows += [str(x.device), (y + 1).tolist(), str(n.utils.get_soc_version())]
try:
    torch.zeros(1, device="npu:2")
except RuntimeError as error:
    rows.append(str(error))
try:
    x + y
except RuntimeError as error:
    rows.append(str(error))
print(json.dumps(rows))""",
        NPU_EMULATOR_DEVICES="2",
        NPU_EMULATOR_SOC="Ascend910_9391",
        NPU_EMULATOR_MEMORY="3GiB",
    )
    assert seen[:4] == [2, "Ascend910_9391 (emulated)", "Ascend910_9391", 3 * 2**30]
    assert seen[4:6] == ["npu:1", [1, 2, 3]]
    assert seen[6] == "250"  # c10_npu::SocVersion::Ascend910_9391
    assert "Invalid device ID" in seen[7]
    assert "two devices, npu:1 and npu:0" in seen[8]


def test_kernels_find_a_cann_version():
    from torch_npu.utils.collect_env import get_cann_version

    assert get_cann_version() == "9.1.0"


def test_child_processes():
    """A child may import torch as usual; it has the device once it starts the emulator, with memory of its own."""
    code = """
import subprocess, sys
plain = "import torch; print(torch.ones(2).sum().item())"
started = "import npu_emulator; npu_emulator.start(); import torch; print(torch.ones(3, device='npu').sum().item())"
run = lambda code: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
print(json.dumps([run(plain), run(started)]))"""
    assert result(code) == ["2.0", "3.0"]


# ---- the device


def test_device_says_that_it_is_emulated():
    assert torch.npu.get_device_name().endswith("(emulated)")
    assert torch.npu.get_device_name(0) == torch.npu.get_device_name()
    assert torch.npu.current_device() == 0


def test_streams_and_events():
    stream = torch.npu.Stream()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(stream):
        start.record()
        x = torch.ones(4, device="npu") * 2
        end.record()
    torch.npu.current_stream().wait_stream(stream)
    torch.npu.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0 and x.sum().item() == 8


def test_copies_between_host_and_device():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for source in (x, x.pin_memory(), x.transpose(0, 2), x[:, 1:], x[..., :1].expand(2, 3, 4)):
        assert torch.equal(source.npu().cpu(), source)
        assert torch.equal(source.to("npu", torch.bfloat16, non_blocking=True).cpu(), source.bfloat16())
        target = torch.empty(source.shape[::-1], device="npu").permute(2, 1, 0)
        assert torch.equal(target.copy_(source).cpu(), source)
        assert torch.equal(torch.empty(source.shape, dtype=torch.float64).copy_(source.npu()), source.double())


# ---- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_uninitialised_memory_is_nan(dtype):
    torch.ones(1000, dtype=dtype, device="npu")  # a block that is used again must not show what it held
    x = torch.empty(1000, dtype=dtype, device="npu")
    for tensor in (
        x,
        torch.empty_like(x),
        x.new_empty(10, 10),
        torch.empty_strided((4, 4), (1, 4), dtype=dtype, device="npu"),
    ):
        assert tensor.isnan().all()


def test_uninitialised_integers_are_minus_one():
    assert (torch.empty(9, dtype=torch.int64, device="npu") == -1).all()


def test_memory_statistics():
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    before, free = torch.npu.memory_allocated(), torch.npu.mem_get_info()[0]
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
    assert 64 * MIB <= torch.npu.memory_allocated() - before < 65 * MIB
    assert torch.npu.mem_get_info()[0] <= free - 64 * MIB
    del x
    assert torch.npu.memory_allocated() == before and torch.npu.max_memory_allocated() >= before + 64 * MIB
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free


def test_what_does_not_fit_is_out_of_memory_and_the_device_goes_on():
    total = torch.npu.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate"):
        torch.empty(2 * total, dtype=torch.uint8, device="npu")
    assert torch.ones(4, device="npu").sum().item() == 4


@pytest.mark.parametrize("allocator", ["expandable_segments:False", "expandable_segments:True"])
def test_memory_limit_counts_what_is_allocated(allocator):
    seen = result(
        """
held = []
try:
    for i in range(100):
        held.append(torch.empty(64 * 2**20, dtype=torch.uint8, device="npu"))
except torch.OutOfMemoryError as error:
    text = str(error)
fitted = len(held)
other = torch.empty(64 * 2**20, dtype=torch.uint8, device="npu:1")  # each device has its own
del held[:4]
held.append(torch.empty(200 * 2**20, dtype=torch.uint8, device="npu"))
print(json.dumps([fitted, text]))""",
        NPU_EMULATOR_MEMORY="512MiB",
        NPU_EMULATOR_DEVICES="2",
        PYTORCH_NPU_ALLOC_CONF=allocator,
    )
    # 8 x 64 MiB would fill the device exactly; blocks carry a little padding, so the eighth does not fit
    assert seen[0] == 7 and "512.00 MiB total capacity" in seen[1]


# ---- failures


def test_mixed_devices_are_refused_with_torchs_words():
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device, but found at least two devices"
    ):
        torch.ones(3, device="npu") + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat((torch.ones(3, device="npu"), torch.ones(3)))
    assert (torch.ones(3, device="npu") + torch.tensor(1.0)).sum().item() == 6  # a number on the host is fine


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: torch.ops.npu.npu_dynamic_quant(x.half()), "aclnnDynamicQuant"),
        (lambda x: torch.ops.npu.npu_iou(x, x), "aclop Iou is not emulated"),
    ],
)
def test_what_is_not_emulated_fails_by_name(call, name):
    with pytest.raises(RuntimeError, match=name):
        call(torch.rand(2, 4, device="npu"))


def test_graph_capture_fails_by_name():
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="graph capture is not emulated"), torch.npu.graph(graph):
        pass


def test_op_without_npu_kernel_falls_back_to_the_cpu_as_torch_npu_does(capfd):
    with npu_emulator.count() as traffic:
        values, _ = torch.mode(torch.tensor([1, 2, 2], device="npu"))
    assert "'aten::mode' is not currently supported on the NPU backend" in capfd.readouterr().err
    assert values.item() == 2 and traffic.launches == 0 and traffic.host_syncs > 0


def test_next_launch_can_be_made_to_fail():
    x, gamma = torch.ones(2, 8, device="npu"), torch.ones(8, device="npu")
    npu_emulator.fail_next("aten::mul")
    with pytest.raises(RuntimeError, match="aten::mul: device error injected"):
        x * 2
    assert (x * 2).sum().item() == 32

    npu_emulator.fail_next("aclnnRmsNorm")
    npu_emulator.fail_next("aclnnRmsNorm")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="aclnnRmsNorm: device error injected"):
            torch.ops.npu.npu_rms_norm(x, gamma)
    torch.ops.npu.npu_rms_norm(x, gamma)


# ---- a trap of the real device


def test_gelu_is_the_tanh_form_on_a2_unless_told_otherwise():
    """torch_npu 2.13 calls aclnnGelu (always tanh) on A2 and A3, and aclnnGeluV2 with its option or on 950."""
    code = """
import torch.nn.functional as F
x = torch.linspace(-3, 3, 13)
y = F.gelu(x.npu()).cpu()
print(json.dumps([torch.allclose(y, F.gelu(x, approximate=form), rtol=0, atol=1e-6) for form in ("none", "tanh")]))"""
    assert result(code) == [False, True]
    assert result(code, TORCH_NPU_USE_COMPATIBLE_IMPL="1") == [True, False]
