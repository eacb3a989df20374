"""The examples are found the way `twinhull up` finds them: beside their system files."""

import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "shop"), str(EXAMPLES / "chargpt")]
os.environ.setdefault("TWINHULL_SHOP_DATA", "synthetic")  # tests need no network
