#!/usr/bin/env python3
"""take.py DIR: puts what a run on a GPU left in DIR (gpu_run.py) into docs/measurements/gpu/DATE-CARD.

Copies results.jsonl, report.md, env.json, rates.json, launches.json and gemm.json, writes machine.json, a file of
rates for `tessera price --machine`, and makes the tables of docs/measurements/gpu/README.md anew from all folders.
machine.json has what "machine" of rates.json measured; what that lacks is taken from the shipped file of the card's
kind, and its source says so. The algorithms of products of all folders become the tables of cards that programs carry
(core/cuda/libraries/tables). A rehearsal, or a run that saw no card, is refused.

    take.py --tables FILE    puts the algorithms of products of all folders into one file, where there are any
    take.py --again          makes the tables anew, those of cards too
"""
import argparse
import json
import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOME = pathlib.Path("docs/measurements/gpu")
SHIPPED = pathlib.Path("core/cuda/libraries/tables")
BEGIN = "<!-- what follows is written by scripts/gpu_kit.sh take -->\n"
TAKEN = ("results.jsonl", "report.md", "env.json", "rates.json", "launches.json", "gemm.json")


class Refused(ValueError):
    pass


def read_json(path):
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Refused(f"{path} is not JSON: {error}") from None


def card_of(environment):
    card = environment["cards"][0]
    return card["name"], card["driver_version"]


def machine_of(measured, environment, root):
    """The file of rates, every key that the price needs in it, each with its source."""
    name, driver = card_of(environment)
    shipped = root / "examples/price/machines" / ("h200.json" if "H200" in name else "h100.json")
    base = read_json(shipped)
    date, commit = environment["date"][:10], environment["commit"][:12]
    machine = {"name": f"{name}, measured {date}"}
    sources = {}
    for key, value in base.items():
        if key in ("name", "sources"):
            continue
        group = value if isinstance(value, dict) else {None: value}
        for inner, number in group.items():
            full = key if inner is None else f"{key}.{inner}"
            found = measured.get(key)
            if inner is not None:
                found = found.get(inner) if isinstance(found, dict) else None
            if found is not None:
                if isinstance(found, bool) or not isinstance(found, (int, float)) or not found > 0:
                    raise Refused(f"rates.json: machine.{full} is no positive number: {found}")
                sources[full] = f"gpu_rates on {name}, driver {driver}, {date}, commit {commit}"
            else:
                said = base.get("sources", {}).get(full, "no source there")
                sources[full] = f"not measured; of {shipped.name}: {said}"
            if inner is None:
                machine[key] = number if found is None else found
            else:
                machine.setdefault(key, {})[inner] = number if found is None else found
    known = set(base) | {"sources"}
    if unknown := sorted(set(measured) - known):
        raise Refused(f"rates.json: machine has keys that a machine file does not: {', '.join(unknown)}")
    machine["sources"] = sources
    return machine


def rows_of(path):
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # cut off while it was written
    return rows


def tables(home):
    """Markdown: runs, and the speeds of steps in them, the latest first."""
    runs = ["| date | card | driver | commit | plan | passed | failed | no time or cut | |",
            "|---|---|---|---|---|---|---|---|---|"]
    speeds = ["| date | card | part | program | dtype | ms a step | tokens/s | GiB of tensors |",
              "|---|---|---|---|---|---|---|---|"]
    for folder in sorted((path.parent for path in home.glob("*/env.json")), reverse=True):
        environment = read_json(folder / "env.json")
        name, driver = card_of(environment)
        date = environment["date"][:10]
        ended = [row for row in rows_of(folder / "results.jsonl") if "part" in row and row["state"] != "begins"]
        count = {state: sum(row["state"] == state for row in ended)
                 for state in ("passed", "FAILED", "no time", "cut")}
        commit = environment["commit"][:12] + (", changed" if environment.get("changed") else "")
        runs.append(f"| {date} | {name} | {driver} | {commit} | {environment['plan']} | {count['passed']} | "
                    f"{count['FAILED']} | {count['no time'] + count['cut']} | [report]({folder.name}/report.md) |")
        for row in ended:
            for figure in row.get("figures", []):
                if "tokens_per_s" in figure:
                    peak = figure.get("peak_tensor_bytes")
                    speeds.append(f"| {date} | {name} | {row['part']} | {figure.get('program', '')} | "
                                  f"{figure.get('dtype', '')} | {figure.get('ms_per_step', '')} | "
                                  f"{figure['tokens_per_s']} | {'' if peak is None else f'{peak / 2**30:.1f}'} |")
    nothing = "Nothing yet.\n"
    return ("\n## Runs\n\n" + ("\n".join(runs) + "\n" if len(runs) > 2 else nothing)
            + "\n## Steps\n\n" + ("\n".join(speeds) + "\n" if len(speeds) > 2 else nothing))


def write_tables(home):
    page = home / "README.md"
    text = page.read_text()
    if BEGIN not in text:
        raise Refused(f"{page} lacks the line {BEGIN.strip()}")
    page.write_text(text[:text.index(BEGIN) + len(BEGIN)] + tables(home))


def take(source, root):
    home = root / HOME
    environment = read_json(source / "env.json")
    if environment is None or not (source / "results.jsonl").exists():
        raise Refused(f"{source} has no env.json or results.jsonl: it is no folder of a run")
    if environment.get("rehearsal"):
        raise Refused(f"{source} is a rehearsal: its figures mean nothing")
    if not environment.get("cards"):
        raise Refused(f"{source}: the run saw no card")
    name, _ = card_of(environment)
    slug = slug_of(name.lower().removeprefix("nvidia "))
    rates = read_json(source / "rates.json")
    machine = None if rates is None else machine_of(rates.get("machine", {}), environment, root)
    for key in (read_json(source / "gemm.json") or {"entries": {}})["entries"]:
        card_of_key(key, source / "gemm.json")
    folder, number = home / f"{environment['date'][:10]}-{slug}", 1
    while folder.exists():  # several runs of a day
        number += 1
        folder = home / f"{environment['date'][:10]}-{slug}-{number}"
    folder.mkdir(parents=True)
    for file in TAKEN:
        if (source / file).exists():
            shutil.copyfile(source / file, folder / file)
    if machine is not None:
        (folder / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")
    write_tables(home)
    write_card_tables(root)
    return folder


def slug_of(card):
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def card_of_key(key, path):
    match = re.match(r"cublasLt \d+, (.+?), driver ", key)
    if match is None:
        raise Refused(f"{path}: the key '{key}' names no card")
    return match[1]


def write_card_tables(root):
    """A file for each card whose products were measured: {"format", "entries"} of the newest folder that has the key."""
    cards, form = {}, None
    for path in sorted((root / HOME).glob("*/gemm.json")):
        table = read_json(path)
        if table["format"] != form:  # the newest form is the one that programs read
            cards, form = {}, table["format"]
        for key, entry in table["entries"].items():
            cards.setdefault(card_of_key(key, path), {})[key] = entry
    folder = root / SHIPPED
    folder.mkdir(parents=True, exist_ok=True)
    for card, entries in cards.items():
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(entries.items()))
        text = f'{{"format": {json.dumps(form)}, "entries": {{\n{lines}}}}}\n'  # a line each
        (folder / f"{slug_of(card)}.json").write_text(text)


def merge_tables(home, target):
    merged = None
    for path in sorted(home.glob("*/gemm.json")):
        table = read_json(path)
        if merged is None:
            merged = table
        elif table["format"] == merged["format"]:
            merged["entries"].update(table["entries"])  # the latest date last
        else:
            merged = table
    if merged is not None:
        target.write_text(json.dumps(merged, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--tables", metavar="FILE")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--root", default=str(ROOT), help="the checkout")
    options = parser.parse_args()
    root = pathlib.Path(options.root)
    try:
        if options.tables:
            merge_tables(root / HOME, pathlib.Path(options.tables))
        elif options.again:
            write_tables(root / HOME)
            write_card_tables(root)
        elif options.folder:
            print(take(pathlib.Path(options.folder), root))
        else:
            parser.error("give a folder of results")
    except (Refused, OSError) as error:
        print(f"take.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
