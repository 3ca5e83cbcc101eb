"""Look at this machine as the kernel would find it; see torch-ext/npu_fusion/doctor.py.

    python scripts/doctor.py [kernel directory] [--hub] [--emulate]

The directory is the one that LOCAL_KERNELS names, or this checkout's build/. With --emulate, the emulator takes the
place of an NPU where there is none.
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--emulate" in arguments:
        arguments.remove("--emulate")
        import npu_emulator

        if npu_emulator.needed():
            npu_emulator.start()
    doctor = runpy.run_path(str(ROOT / "torch-ext/npu_fusion/doctor.py"))
    named = dict(entry.partition("=")[::2] for entry in os.environ.get("LOCAL_KERNELS", "").split(":"))
    sys.exit(doctor["main"](arguments, Path(named.get(doctor["REPOSITORY"]) or ROOT / "build")))
