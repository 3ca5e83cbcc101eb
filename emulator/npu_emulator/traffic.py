"""Counts what the emulated device was asked to do: launches, and bytes read and written, by op."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from npu_emulator.launcher import runtime


@dataclass(frozen=True)
class OpTraffic:
    """The launches of one op and the bytes that they moved."""

    launches: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def __sub__(self, other: "OpTraffic") -> "OpTraffic":
        return OpTraffic(
            self.launches - other.launches,
            self.bytes_read - other.bytes_read,
            self.bytes_written - other.bytes_written,
        )


def _snapshot() -> tuple[dict[str, OpTraffic], int]:
    by_op = {}
    for line in runtime().emulator_traffic().decode().splitlines():
        op, *numbers = line.split(" ")
        by_op[op] = OpTraffic(*map(int, numbers))
    return by_op, runtime().emulator_host_syncs()


class Traffic:
    """What happened since a `count()` block was entered; it stands still once the block is left.

    Attributes:
        by_op: OpTraffic by op name: "aten::mm", "aclnnRmsNorm".
        host_syncs: How often the host waited for a value of the device.
    """

    def __init__(self) -> None:
        self._before = _snapshot()
        self._after = None

    def _close(self) -> None:
        self._after = _snapshot()

    @property
    def by_op(self) -> dict[str, OpTraffic]:
        before, after = self._before[0], (self._after or _snapshot())[0]
        difference = {op: traffic - before.get(op, OpTraffic()) for op, traffic in after.items()}
        return {op: traffic for op, traffic in difference.items() if traffic.launches}

    @property
    def host_syncs(self) -> int:
        return (self._after or _snapshot())[1] - self._before[1]

    @property
    def launches(self) -> int:
        return sum(traffic.launches for traffic in self.by_op.values())

    @property
    def bytes_read(self) -> int:
        return sum(traffic.bytes_read for traffic in self.by_op.values())

    @property
    def bytes_written(self) -> int:
        return sum(traffic.bytes_written for traffic in self.by_op.values())

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    def __str__(self) -> str:
        total = OpTraffic(self.launches, self.bytes_read, self.bytes_written)
        rows = sorted(self.by_op.items(), key=lambda row: row[1].bytes_read + row[1].bytes_written, reverse=True)
        rows.append((f"emulated NPU, {self.host_syncs} host syncs", total))
        width = max(len(op) for op, _ in rows)
        return "\n".join(
            f"{op:{width}} {row.launches:6} launches {row.bytes_read:14,} B read {row.bytes_written:14,} B written"
            for op, row in rows
        )


@contextmanager
def count(skip_matmuls: bool = False) -> Iterator[Traffic]:
    """Count launches and bytes inside the block, of all threads of the process.

    Args:
        skip_matmuls: Count matrix products and attention, but fill their results with zeros instead of computing
            them, so that real model sizes can be counted in little time.

    Example:
        with npu_emulator.count() as traffic:
            model(inputs)
        print(traffic.launches, traffic.bytes, traffic.by_op["aten::mm"])

    Raises:
        RuntimeError: If the emulator was not started.
    """
    traffic = Traffic()
    runtime().emulator_begin_count(skip_matmuls)
    try:
        yield traffic
    finally:
        runtime().emulator_end_count(skip_matmuls)
        traffic._close()
