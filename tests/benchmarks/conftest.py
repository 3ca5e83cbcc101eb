import sys
from pathlib import Path

# The scripts import each other by name, as `python benchmarks/footprint.py` lets them.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
