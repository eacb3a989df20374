"""Which sales does the shop work with? `python -m shop [--data PATH]` says it; downloads them if need be."""

import sys

from shop import sales
from shop.sales import SPLIT
from twinhull import logs


def main() -> None:
    """Find the sales and print what they are."""
    logs.setup("shop")
    try:
        sales.take_option(sys.argv)
        known = sales.find()
    except sales.SalesError as error:
        sys.exit(str(error))
    print(f"source       {known.source}")
    print(f"real         {'yes' if known.real else 'no'}")
    print(
        f"lines        {len(known):,}, {int((known.minute >= SPLIT).sum()):,} of them from 1 November 2011 on"
    )
    print(f"customers    {len(set(known.customer.tolist())):,}")
    print(f"items        {known.num_items:,}")
    print(f"fingerprint  {known.fingerprint()}")


if __name__ == "__main__":
    main()
