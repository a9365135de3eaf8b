"""Makes the simulated worker of the agent's unit tests importable here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "agent"))
