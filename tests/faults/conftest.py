"""Makes the simulated worker of the agent's unit tests importable here."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "unit" / "agent")]
