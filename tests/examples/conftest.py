"""The shop is found the way `twinhull up` finds it: beside its system file."""

import os
import sys
from pathlib import Path

SHOP = Path(__file__).parents[2] / "examples" / "shop"
sys.path.insert(0, str(SHOP))
os.environ.setdefault("TWINHULL_SHOP_DATA", "synthetic")  # tests need no network
