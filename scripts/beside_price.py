#!/usr/bin/env python3
"""beside_price.py MEASURED PRICE: what the launches of a step took beside what they were priced at.

MEASURED is bench_step's --launch-times, PRICE is `tessera price --json` or --trace, of the same model
and batch; --trace keeps each launch, which --by request and --ordered need. Prints a table in Markdown,
the longest first. Rows are those of the price: a launch's layer, its numbers left out ("h.*.mlp"), op
and name. --by name: name alone; --by request: of products and other work of libraries, what they were
asked for. --ordered: launch after launch, the n-th of a layer, op and name beside the price's n-th.
Both hold the gaps between launches."""

import argparse
import collections
import json
import re


def without_numbers(layer):
    return ".".join("*" if word.isdigit() else word for word in layer.split("."))


def read_price(path):
    """Rows {"name", "op", "layer", "request", "calls", "ms"}, and whether each is one launch."""
    with open(path) as file:
        price = json.load(file)
    if "traceEvents" not in price:
        return [{**row, "request": ""} for row in price["launches"]], False
    launches = []
    for event in price["traceEvents"]:
        if event["ph"] == "X" and "bound" in event.get("args", {}):
            launches.append({"name": event["name"], "op": event["args"]["op"],
                             "layer": event["args"]["layer"], "request": event["args"]["request"],
                             "calls": 1, "ms": event["dur"] * 1e-3})
    return launches, True


def key_of(row, by):
    if by == "name":
        return (row["name"],)
    if by == "request":
        # addresses are no part of what is compared
        return (row["name"], re.sub(r",?@\d+", "", row["request"]))
    return (without_numbers(row["layer"]), row["op"], row["name"])


TITLES = {"name": ("launch",), "request": ("launch", "request"), "layer": ("layer", "op", "launch")}


def sums(rows, by):
    result = collections.defaultdict(lambda: [0, 0.0])
    for row in rows:
        total = result[key_of(row, by)]
        total[0] += row.get("calls", 1)
        total[1] += row["ms"]
    return result


def line(cells, measured, priced):
    ratio = f"{measured / priced:.2f}" if priced else ""
    words = [cell if cell != "" else "-" for cell in map(str, cells)]
    print("| " + " | ".join([*words, f"{measured:.4f}", f"{priced:.4f}", ratio]) + " |")


def head(titles):
    titles = [*titles, "ms", "priced", "measured of priced"]
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))


def print_sums(measured, priced, by, most):
    ours, theirs = sums(measured, by), sums(priced, by)
    keys = sorted(set(ours) | set(theirs),
                  key=lambda key: (-max(ours[key][1], theirs[key][1]), key))
    head([*TITLES[by], "calls", "priced calls"])
    for key in keys[:most]:
        line([*key, ours[key][0], theirs[key][0]], ours[key][1], theirs[key][1])
    blank = [""] * (len(TITLES[by]) - 1)
    line(["**all**", *blank, sum(total[0] for total in ours.values()),
          sum(total[0] for total in theirs.values())],
         sum(total[1] for total in ours.values()), sum(total[1] for total in theirs.values()))


def print_ordered(measured, priced):
    def exact(row):
        return (row["layer"], row["op"], row["name"])

    waiting = collections.defaultdict(collections.deque)
    for row in priced:
        waiting[exact(row)].append(row)
    head(["layer", "op", "launch", "request"])
    for row in measured:
        queue = waiting[exact(row)]
        line([*exact(row), row["request"]], row["ms"], queue.popleft()["ms"] if queue else 0)
    left = collections.Counter(exact(row) for queue in waiting.values() for row in queue)
    for key, count in left.items():
        print(f"\npriced and not launched: {' | '.join(key)}, {count} times")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("measured")
    parser.add_argument("price")
    parser.add_argument("--rows", type=int, default=25, help="of a summed table")
    parser.add_argument("--by", choices=sorted(TITLES), default="layer")
    parser.add_argument("--ordered", action="store_true", help="launch after launch")
    options = parser.parse_args()
    with open(options.measured) as file:
        measured = json.load(file)
    priced, each = read_price(options.price)
    if (options.ordered or options.by == "request") and not each:
        parser.error("--ordered and --by request need each launch: give `tessera price --trace`")
    if options.by == "request":
        measured = [row for row in measured if row["request"]]
        priced = [row for row in priced if row["request"]]
    if options.ordered:
        print_ordered(measured, priced)
    else:
        print_sums(measured, priced, options.by, options.rows)


if __name__ == "__main__":
    main()
