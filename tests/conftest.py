"""What all tests share: where the real data is, and that nothing is left running."""

import os
from pathlib import Path

SHOP_DATA = Path(__file__).parents[2] / "shared" / "data" / "online_retail.npz"

if SHOP_DATA.exists():
    os.environ.setdefault("TWINHULL_SHOP_DATA", str(SHOP_DATA))
os.environ.pop("TWINHULL_BROKER", None)  # tests start brokers of their own
