#!/usr/bin/env python3
"""beside_price.py MEASURED PRICE: what the launches of a step took beside what they were priced at.

MEASURED is bench_step's --launch-times, PRICE is `tessera price --json`, of the same model and batch.
Prints a table in Markdown by the name of the launch, the longest first. Both hold the gaps between
launches."""

import argparse
import collections
import json


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("measured")
    parser.add_argument("price")
    parser.add_argument("--rows", type=int, default=25, help="of the table")
    options = parser.parse_args()
    with open(options.measured) as file:
        measured = {row["name"]: row for row in json.load(file)}
    with open(options.price) as file:
        price = json.load(file)
    priced = collections.defaultdict(lambda: {"calls": 0, "ms": 0.0})
    for row in price["launches"]:
        total = priced[row["name"]]
        total["calls"] += row["calls"]
        total["ms"] += row["ms"]

    def of(rows, name, key):
        return rows[name][key] if name in rows else 0

    names = sorted(set(measured) | set(priced), reverse=True,
                   key=lambda name: max(of(measured, name, "ms"), of(priced, name, "ms")))
    print("| launch | calls | priced calls | ms | priced | measured of priced |")
    print("|---|---|---|---|---|---|")
    rows = [(name, of(measured, name, "calls"), of(priced, name, "calls"),
             of(measured, name, "ms"), of(priced, name, "ms")) for name in names[:options.rows]]
    rows.append(("**all**", sum(row["calls"] for row in measured.values()),
                 sum(row["calls"] for row in priced.values()),
                 sum(row["ms"] for row in measured.values()),
                 sum(row["ms"] for row in priced.values())))
    for name, calls, priced_calls, ms, expected in rows:
        ratio = f"{ms / expected:.2f}" if expected else ""
        print(f"| {name} | {calls} | {priced_calls} | {ms:.3f} | {expected:.3f} | {ratio} |")


if __name__ == "__main__":
    main()
