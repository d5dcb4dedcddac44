"""Puts this folder on the path: tests and the ranks' processes import the same names."""

import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
sys.path.insert(0, _HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([_HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
