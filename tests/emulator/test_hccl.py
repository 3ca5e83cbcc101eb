"""The emulator's collectives, through torch.distributed and torch_npu's own ProcessGroupHCCL.

Every rank can compute what every other rank puts in, so each checks its own result, exactly: the order of a reduction
is the order of ranks, and the reference adds in the same order.
"""

import functools
import os
import signal
import threading
import time
from pathlib import Path

import launch
import npu_emulator
import pytest
import torch
import torch.distributed as dist

INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
REDUCED = INTEGERS + FLOATS
MOVED = [*REDUCED, torch.float64, torch.uint8, torch.bool]
SUM, PRODUCT, MAX, MIN, AVG = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MAX,
    dist.ReduceOp.MIN,
    dist.ReduceOp.AVG,
)


def data(rank, dtype, size=1003):
    """What `rank` puts in; odd sizes, so that no split into ranks is even."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(0 if dtype in (torch.uint8, torch.bool) else -5, 6, (size,), generator=generator).to(dtype)


def reduced(op, tensors):
    """16-bit floats are accumulated in float32 and rounded once."""
    combine = {SUM: torch.add, PRODUCT: torch.mul, MAX: torch.maximum, MIN: torch.minimum}[op]
    dtype = tensors[0].dtype
    wide = [t.float() if dtype.is_floating_point else t for t in tensors]
    return functools.reduce(combine, wide).to(dtype)


def same(actual, expected, what):
    assert actual.dtype == expected.dtype, what
    assert torch.equal(actual.cpu(), expected), what


def everyone(dtype, size=1003):
    return [data(rank, dtype, size) for rank in range(dist.get_world_size())]


# ---- collectives: each function runs on every rank


def all_reduce():
    for dtype in REDUCED:
        for op in (SUM, PRODUCT, MAX, MIN):
            if op == PRODUCT and dtype in (torch.int16, torch.bfloat16):
                continue  # refused, see test_refused
            tensor = data(dist.get_rank(), dtype).npu()
            dist.all_reduce(tensor, op)
            same(tensor, reduced(op, everyone(dtype)), (dtype, op))


def all_reduce_avg():
    # torch_npu sums on the device and then divides, so 16-bit floats are rounded twice.
    for dtype in FLOATS:
        tensor = data(dist.get_rank(), dtype).npu()
        dist.all_reduce(tensor, AVG)
        same(tensor, reduced(SUM, everyone(dtype)) / dist.get_world_size(), dtype)


def all_reduce_coalesced():
    tensors = [data(dist.get_rank(), torch.float32, size).npu() for size in (3, 0, 1003)]
    with dist._coalescing_manager(device=torch.device("npu")):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor, size in zip(tensors, (3, 0, 1003), strict=True):
        same(tensor, reduced(SUM, everyone(torch.float32, size)), size)


def reduce():
    for dtype in REDUCED:
        for root in range(dist.get_world_size()):
            tensor = data(dist.get_rank(), dtype).npu()
            dist.reduce(tensor, root, SUM)
            if dist.get_rank() == root:
                same(tensor, reduced(SUM, everyone(dtype)), (dtype, root))


def reduce_scatter():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in REDUCED:
        for op in (SUM, MAX):
            expected = reduced(op, everyone(dtype, 7 * size))[7 * rank : 7 * (rank + 1)]
            whole = data(rank, dtype, 7 * size).npu()
            out = torch.empty(7, dtype=dtype, device="npu")
            dist.reduce_scatter_tensor(out, whole, op)
            same(out, expected, ("tensor", dtype, op))
            out = torch.empty(7, dtype=dtype, device="npu")
            dist.reduce_scatter(out, list(whole.chunk(size)), op)
            same(out, expected, ("list", dtype, op))


def reduce_scatter_uneven():
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [3 * r + 1 for r in range(size)]
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        out = torch.empty(counts[rank], dtype=dtype, device="npu")
        dist.reduce_scatter(out, list(data(rank, dtype, sum(counts)).npu().split(counts)), SUM)
        same(out, reduced(SUM, everyone(dtype, sum(counts))).split(counts)[rank], dtype)


def broadcast():
    for dtype in MOVED:
        for root in range(dist.get_world_size()):
            tensor = data(dist.get_rank(), dtype).npu()
            dist.broadcast(tensor, root)
            same(tensor, data(root, dtype), (dtype, root))


def all_gather():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        parts = [torch.empty(1003, dtype=dtype, device="npu") for _ in range(size)]
        dist.all_gather(parts, data(rank, dtype).npu())
        whole = torch.empty(1003 * size, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(whole, data(rank, dtype).npu())
        same(torch.cat(parts), torch.cat(everyone(dtype)), ("list", dtype))
        same(whole, torch.cat(everyone(dtype)), ("tensor", dtype))


def all_gather_in_place():
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(8 * size, device="npu")
    own = whole[8 * rank : 8 * (rank + 1)]
    own.copy_(data(rank, torch.float32, 8))
    dist.all_gather_into_tensor(whole, own)
    same(whole, torch.cat(everyone(torch.float32, 8)), "in place")


def all_gather_uneven():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        parts = [torch.empty(5 * r + 1, dtype=dtype, device="npu") for r in range(size)]
        dist.all_gather(parts, data(rank, dtype, 5 * rank + 1).npu())
        for r, part in enumerate(parts):
            same(part, data(r, dtype, 5 * r + 1), (dtype, r))


def scatter():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        for root in range(size):
            out = torch.empty(9, dtype=dtype, device="npu")
            parts = list(data(root, dtype, 9 * size).npu().chunk(size)) if rank == root else None
            dist.scatter(out, parts, root)
            same(out, data(root, dtype, 9 * size)[9 * rank : 9 * (rank + 1)], (dtype, root))


def gather():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        parts = [torch.empty(9, dtype=dtype, device="npu") for _ in range(size)] if rank == 1 else None
        dist.gather(data(rank, dtype, 9).npu(), parts, dst=1)
        if rank == 1:
            same(torch.cat(parts), torch.cat(everyone(dtype, 9)), dtype)


def all_to_all():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        ins = list(data(rank, dtype, 6 * size).npu().chunk(size))
        outs = [torch.empty(6, dtype=dtype, device="npu") for _ in range(size)]
        dist.all_to_all(outs, ins)
        whole = torch.empty(6 * size, dtype=dtype, device="npu")
        dist.all_to_all_single(whole, data(rank, dtype, 6 * size).npu())
        expected = torch.cat([part.chunk(size)[rank] for part in everyone(dtype, 6 * size)])
        same(torch.cat(outs), expected, ("list", dtype))
        same(whole, expected, ("single", dtype))


def all_to_all_splits():
    # Rank s sends s + 2r elements to rank r: nothing from 0 to 0.
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        sent = [[s + 2 * r for r in range(size)] for s in range(size)]
        received = [sent[s][rank] for s in range(size)]
        out = torch.empty(sum(received), dtype=dtype, device="npu")
        dist.all_to_all_single(out, data(rank, dtype, sum(sent[rank])).npu(), received, sent[rank])
        expected = [data(s, dtype, sum(sent[s])).split(sent[s])[rank] for s in range(size)]
        same(out, torch.cat(expected), dtype)


def send_recv():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        # A chain: each rank receives, then passes on.
        tensor = data(0, dtype).npu() if rank == 0 else torch.empty(1003, dtype=dtype, device="npu")
        if rank > 0:
            dist.recv(tensor, rank - 1)
        if rank < size - 1:
            dist.send(tensor, rank + 1)
        same(tensor, data(0, dtype), dtype)


def batch_isend_irecv():
    # A ring: everybody sends and receives at once, more than any buffer between them holds.
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, count in [*((dtype, 1003) for dtype in MOVED), (torch.float32, 2_000_003)]:
        out = torch.empty(count, dtype=dtype, device="npu")
        ops = [
            dist.P2POp(dist.isend, data(rank, dtype, count).npu(), (rank + 1) % size),
            dist.P2POp(dist.irecv, out, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(out, data((rank - 1) % size, dtype, count), (dtype, count))


def barrier():
    # Nobody leaves before the last has come: a later stamp in the store would prove it wrong.
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    time.sleep(0.1 * rank)
    store.add("arrived", 1)
    dist.barrier()
    assert store.add("arrived", 0) == dist.get_world_size()


def objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]
    box = [rank * 10]
    dist.broadcast_object_list(box, src=1)
    assert box == [10]


COLLECTIVES = [
    all_reduce, all_reduce_avg, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_uneven, broadcast,
    all_gather, all_gather_in_place, all_gather_uneven, scatter, gather, all_to_all, all_to_all_splits, send_recv,
    batch_isend_irecv, barrier, objects,
]  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda function: function.__name__)
def test_collective(collective, world_size):
    launch.run(collective, world_size)


def empty():
    rank, size = dist.get_rank(), dist.get_world_size()
    nothing = torch.empty(0, device="npu")
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 1)
    dist.all_gather_into_tensor(torch.empty(0, device="npu"), nothing)
    dist.reduce_scatter_tensor(torch.empty(0, device="npu"), nothing)
    dist.all_to_all_single(torch.empty(0, device="npu"), nothing, [0] * size, [0] * size)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(torch.empty(0, device="npu"), 1 - rank)
    # Only one rank has anything.
    parts = [torch.full((3 if r == 1 else 0,), -1.0, device="npu") for r in range(size)]
    dist.all_gather(parts, torch.ones(3 if rank == 1 else 0, device="npu"))
    same(torch.cat(parts), torch.ones(3), "one rank has something")


def test_empty():
    launch.run(empty, 4)


def large():
    # 12 MB a rank, far more than a socket holds; the sum of four float32 is exact where values are small integers.
    rank, size, count = dist.get_rank(), dist.get_world_size(), 3_000_001
    tensor = (torch.arange(count) % 1000 + rank).float().npu()
    dist.all_reduce(tensor)
    expected = (torch.arange(count) % 1000).float() * size + sum(range(size))
    same(tensor, expected, "all_reduce")
    whole = torch.empty(count * size, device="npu")
    dist.all_gather_into_tensor(whole, torch.full((count,), float(rank), device="npu"))
    assert all((part == r).all().item() for r, part in enumerate(whole.chunk(size)))
    sent = [100_000 * (r + 1) for r in range(size)]
    received = [sent[rank]] * size
    out = torch.empty(sum(received), device="npu")
    dist.all_to_all_single(out, torch.full((sum(sent),), float(rank), device="npu"), received, sent)
    assert all((part == r).all().item() for r, part in enumerate(out.chunk(size)))


def test_large():
    launch.run(large, 4)


def rounds_once():
    # One by one, 256 + 1 rounds back to 256 in bfloat16, and 2048 + 1 to 2048 in float16.
    results = {}
    for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        tensor = torch.tensor([big if dist.get_rank() == 0 else 1.0], dtype=dtype, device="npu")
        dist.all_reduce(tensor)
        results[dtype] = tensor.item()
    return results


def test_16_bit_floats_are_rounded_once():
    # 259 and 2051 lie half way; ties go to the even neighbour.
    assert launch.run(rounds_once, 4) == [{torch.bfloat16: 260.0, torch.float16: 2052.0}] * 4


def special_values():
    rank = dist.get_rank()
    for dtype in FLOATS:
        tensor = torch.tensor(
            [float("nan") if rank == 1 else 1.0, float("inf") if rank else 1.0], dtype=dtype, device="npu"
        )
        for op in (SUM, MAX, MIN):
            result = tensor.clone()
            dist.all_reduce(result, op)
            assert result[0].isnan().item(), (dtype, op)
            assert result[1].item() == (1.0 if op == MIN else float("inf")), (dtype, op)
    wrapped = torch.tensor([100], dtype=torch.int8, device="npu")
    dist.all_reduce(wrapped)
    assert wrapped.item() == 200 - 256


def test_special_values():
    launch.run(special_values, 2)


# ---- several communicators


def groups():
    rank = dist.get_rank()
    low, high, even = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2])
    mine = low if rank < 2 else high
    tensors = {group: torch.tensor([float(rank)], device="npu") for group in (mine, even, None)}
    for _ in range(3):  # interleaved on all of them
        dist.all_reduce(tensors[mine], group=mine)
        dist.all_reduce(tensors[None])
        if rank in (0, 2):
            dist.all_reduce(tensors[even], group=even)
    sub = torch.tensor([float(rank)], device="npu")
    dist.broadcast(sub, src=2 if rank >= 2 else 0, group=mine)
    return tensors[mine].item(), tensors[None].item(), tensors[even].item(), sub.item()


def test_groups():
    # Three sums: over two ranks 1 -> 2 -> 4 and 5 -> 10 -> 20, over four 6 -> 24 -> 96, over 0 and 2: 2 -> 4 -> 8.
    assert launch.run(groups, 4) == [
        (4.0, 96.0, 8.0, 0.0),
        (4.0, 96.0, 1.0, 0.0),
        (20.0, 96.0, 8.0, 2.0),
        (20.0, 96.0, 3.0, 2.0),
    ]


def threads():
    # Two groups of the same ranks, each used by a thread of its own.
    comms = [dist.new_group([0, 1]) for _ in range(2)]
    for group in comms:
        dist.barrier(group=group)
    results = [None, None]

    def work(index):
        torch.npu.set_device(dist.get_rank())
        total = torch.zeros(1000, device="npu")
        for step in range(50):
            tensor = torch.full((1000,), float(index + step), device="npu")
            dist.all_reduce(tensor, group=comms[index])
            total += tensor
        results[index] = total[0].item()

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def test_threads():
    assert launch.run(threads, 2) == [[2.0 * sum(range(50)), 2.0 * sum(range(1, 51))]] * 2


def traffic():
    rank = dist.get_rank()
    tensor, whole, part = torch.ones(100, device="npu"), torch.ones(200, device="npu"), torch.ones(100, device="npu")
    with npu_emulator.count() as traffic:
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.broadcast(tensor, 0)
        (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
    return {
        name: (t.launches, t.bytes_read, t.bytes_written)
        for name, t in traffic.by_op.items()
        if name.startswith("Hccl")
    }


@pytest.mark.skipif(not npu_emulator.needed(), reason="counts what the emulated device moved")
def test_traffic():
    common = {"HcclAllReduce": (1, 400, 400), "HcclAllGather": (1, 400, 800), "HcclReduceScatter": (1, 800, 400)}
    assert launch.run(traffic, 2) == [
        common | {"HcclBroadcast": (1, 400, 0), "HcclSend": (1, 400, 0)},
        common | {"HcclBroadcast": (1, 0, 400), "HcclRecv": (1, 0, 400)},
    ]


# ---- what is refused, and faults


def refused():
    def message(call):
        with pytest.raises(RuntimeError) as error:
            call()
        return str(error.value)

    def tensor(dtype):
        return torch.ones(4, dtype=dtype, device="npu")

    messages = {
        "product of bfloat16": message(lambda: dist.all_reduce(tensor(torch.bfloat16), PRODUCT)),
        "product of int16": message(lambda: dist.all_reduce(tensor(torch.int16), PRODUCT)),
        "float64": message(lambda: dist.all_reduce(tensor(torch.float64))),
        "bitwise or": message(lambda: dist.all_reduce(tensor(torch.int32), dist.ReduceOp.BOR)),
    }
    dist.all_reduce(tensor(torch.float32))  # a refusal hurts nobody: nothing had been sent
    return messages


def test_refused():
    messages = launch.run(refused, 2)[0]
    assert "HcclAllReduce(prod) of bfloat16 is not supported on Atlas A2" in messages["product of bfloat16"]
    assert "HcclAllReduce(prod) of int16 is not supported on Atlas A2" in messages["product of int16"]
    assert "Unsupported data type" in messages["float64"]  # torch_npu's own refusal
    assert "BOR" in messages["bitwise or"]


def mismatch(kind):
    rank = dist.get_rank()

    def ones(count, dtype=torch.float32):
        return torch.ones(count, dtype=dtype, device="npu")

    calls = {
        "count": [lambda: dist.all_reduce(ones(4)), lambda: dist.all_reduce(ones(5))],
        "dtype": [lambda: dist.all_reduce(ones(4)), lambda: dist.all_reduce(ones(4, torch.int32))],
        "op": [lambda: dist.all_reduce(ones(4)), lambda: dist.all_reduce(ones(4), MAX)],
        "collective": [lambda: dist.all_reduce(ones(4)), lambda: dist.broadcast(ones(4), 0)],
        "root": [lambda: dist.broadcast(ones(4), 0), lambda: dist.broadcast(ones(4), 1)],
        "send": [lambda: dist.send(ones(4), 1), lambda: dist.recv(ones(3), 0)],
        "splits": [
            lambda: dist.all_to_all_single(ones(4), ones(4), [1, 3], [1, 3]),
            lambda: dist.all_to_all_single(ones(3), ones(3), [2, 1], [2, 1]),
        ],
    }
    calls[kind][rank]()


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("count", ("AllReduce(sum) of 4 float32", "AllReduce(sum) of 5 float32")),
        ("dtype", ("AllReduce(sum) of 4 float32", "AllReduce(sum) of 4 int32")),
        ("op", ("AllReduce(sum) of 4 float32", "AllReduce(max) of 4 float32")),
        ("collective", ("AllReduce(sum) of 4 float32", "Broadcast of 4 float32 with root 0")),
        ("root", ("Broadcast of 4 float32 with root 0", "Broadcast of 4 float32 with root 1")),
        ("splits", ("AlltoAllV of 3 float32", "AlltoAllV of 2 float32")),
        ("send", ("Send/Recv of 4 float32", "Send/Recv of 3 float32")),
    ],
)
def test_mismatch(kind, calls):
    outcomes = launch.run_to_outcomes(mismatch, 2, kind)
    for outcome, other in zip(outcomes, reversed(outcomes), strict=True):
        assert outcome.seconds < 30  # at once, but for a busy machine; a timeout would take 48 s
        # A rank that was told why the other left repeats what that one said.
        assert "mismatch: this rank calls" in outcome.error
        assert all(call in outcome.error for call in calls), outcome.error
        assert f"rank {other.rank} (process " in outcome.error


def failed_communicator():
    other = dist.new_group([0, 1])
    dist.barrier(group=other)
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(4 + dist.get_rank(), device="npu"))
        messages.append(str(error.value))
    tensor = torch.ones(1, device="npu")
    dist.all_reduce(tensor, group=other)
    return messages, tensor.item()


def test_a_failed_communicator_stays_failed_and_others_go_on():
    for messages, total in launch.run(failed_communicator, 2):
        assert "the communicator failed earlier" in messages[1] and "mismatch" in messages[1]
        assert total == 2.0


def dies(how):
    rank = dist.get_rank()
    if rank == 1:
        if how == "with a forked child" and os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(1_000_000, device="npu"))
    return time.monotonic() - start, str(error.value)


@pytest.mark.parametrize("how", ["kill", "exit", "with a forked child"])
def test_dead_rank(how):
    outcomes = launch.run_to_outcomes(dies, 4, how)
    assert outcomes[1].exitcode == (3 if how == "exit" else -signal.SIGKILL)
    for rank in (0, 2, 3):
        seconds, message = outcomes[rank].value
        assert seconds < 3, "a death is noticed at once, not after a timeout"
        assert "rank 1 (process" in message and "is gone: its process has exited or was killed" in message


def is_late(seconds):
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    if dist.get_rank() == 1:
        time.sleep(seconds)
    tensor = torch.ones(1, device="npu")
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_late_rank_is_waited_for():
    assert launch.run(is_late, 2, 1.0, env={"HCCL_EXEC_TIMEOUT": "30"}) == [2.0, 2.0]


def test_late_rank_beyond_the_timeout():
    outcomes = launch.run_to_outcomes(is_late, 2, 1.8, env={"HCCL_EXEC_TIMEOUT": "1"})
    expected = "AllReduce(sum) of 1 float32: no progress for 1 s (HCCL_EXEC_TIMEOUT) while waiting for rank 1 (process"
    assert expected in outcomes[0].error
    assert (
        "rank 0 (process" in outcomes[1].error and "left: " in outcomes[1].error and "no progress" in outcomes[1].error
    )


def never_joins():
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1, device="npu"), group=group)


def test_rank_that_never_joins():
    outcome = launch.run_to_outcomes(never_joins, 2, env={"HCCL_CONNECT_TIMEOUT": "1"})[0]
    assert "rank 1 did not come within 1 s (HCCL_CONNECT_TIMEOUT)" in outcome.error


def both_send_first():
    rank = dist.get_rank()
    dist.send(torch.ones(1, device="npu"), 1 - rank)
    dist.recv(torch.ones(1, device="npu"), 1 - rank)


def test_both_send_first():
    # A deadlock on Ascend whatever the size, so it must not pass here for small messages.
    outcomes = launch.run_to_outcomes(both_send_first, 2, env={"HCCL_EXEC_TIMEOUT": "1"})
    assert all(outcome.error and "Send/Recv of 1 float32" in outcome.error for outcome in outcomes)


def sockets_of_this_process():
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {
        fields[7] for fields in lines if len(fields) > 7 and fields[6] in inodes and "npu-emulator-hccl" in fields[7]
    }


def leaves_nothing(kill):
    dist.all_reduce(torch.ones(1_000_000, device="npu"))
    names, mapped = sockets_of_this_process(), "/dev/shm" in Path("/proc/self/maps").read_text()
    if dist.get_rank() == 1 and kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return names, mapped


@pytest.mark.skipif(not npu_emulator.needed(), reason="about the emulator's sockets")
@pytest.mark.parametrize("kill", [False, True])
def test_nothing_is_left_behind(kill):
    outcomes = launch.run_to_outcomes(leaves_nothing, 2, kill)
    names, mapped = outcomes[0].value
    assert len(names) == 1 and not mapped, "one name, and no shared memory at all"
    token = names.pop().rsplit("-", 1)[0]
    assert token not in Path("/proc/net/unix").read_text()
