"""The result of `pagedattn bench kernels` as tables and as a roofline, from its JSON alone."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pagedattn import viz

RATES = {
    "read": "reading",
    "read_through_table": "reading through a block table",
    "copy": "copying",
    "matmul": "matrix product, bf16",
}
PER_US = 1e-6  # bytes a microsecond -> TB a second, operations -> TFLOP
LABELS = {
    "decode": {
        "1x512": "1x512",
        "1x8192": "1x8192",
        "64x8192": "64x8192",
        "64x8192 fp8 cache": "64x8192, fp8 cache",
        "64x8448 shared 8192": "64x8448, a prefix of 8192 shared",
        "MHA 64x2048": "MHA",
    },
    "prefill": {"1x8192": "1x8192", "4x4096": "4x4096", "16x1024": "16x1024"},
    "mixed": {"step": "mixed step"},
}


def report(result: dict[str, Any], console: Console) -> None:
    """Ceilings, rows, the climb, time on the CPU, and why peers are missing."""
    ceilings = result["ceilings"]
    for key, name in RATES.items():
        unit = "TFLOP/s" if key == "matmul" else "TB/s"
        console.print(f"{name}: {ceilings[key] * PER_US:.2f} {unit}", highlight=False)
    console.print(f"an empty node of a graph: {ceilings['node']:.2f} µs", highlight=False)
    if result["rows"]:
        console.print(rows_table(result))
    if result["climb"]:
        console.print(climb_table(result))
    if result["host"]:
        console.print(host_table(result))
    for reason in absences(result):
        console.print(reason, highlight=False, markup=False)


def rows_table(result: dict[str, Any]) -> Table:
    """One row a row: its time, its floor, the share of it, and the best peer."""
    table = Table(box=SIMPLE, padding=0, caption="floor: the least time; share: floor / time")
    table.add_column("")
    for heading in ("µs", "floor", "set by", "share", "rate", "best peer", "µs", "ratio"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        floor = f"{row['floor_us']:.1f}", row["limit"]
        if "us" not in row:
            table.add_row(row["name"], "failed", *floor)
            continue
        peer = ("", "", "")
        if "best_peer" in row:
            time = row["peers"][row["best_peer"]]["us"]
            peer = row["best_peer"], f"{time:.1f}", f"{row['ratio']:.3f}"
        share = f"{row['share']:.1%}"
        table.add_row(row["name"], f"{row['us']:.1f}", *floor, share, _rate(row), *peer)
    return table


def _rate(row: dict[str, Any]) -> str:
    """What a row reaches of that which limits it."""
    if row["limit"] == "matmul":
        return f"{row['flops'] / row['us'] * PER_US:.0f} TFLOP/s"
    if row["limit"] == "memory":
        return f"{(row['read'] + row['written']) / row['us'] * PER_US:.2f} TB/s"
    return ""


def climb_table(result: dict[str, Any]) -> Table:
    """One row a step, one column a batch."""
    climbs = result["climb"]
    table = Table(box=SIMPLE, padding=0, title="the climb, µs")
    table.add_column("")
    for name in climbs:
        table.add_column(name, justify="right")
    for step in next(iter(climbs.values())):
        found = [climb[step] for climb in climbs.values()]
        table.add_row(step, *(f"{f['us']:.1f}" if "us" in f else "failed" for f in found))
    return table


def host_table(result: dict[str, Any]) -> Table:
    """One row for ours and each peer, one column a call."""
    host = result["host"]
    table = Table(box=SIMPLE, padding=0, title="a call on the CPU, without a graph, µs")
    table.add_column("")
    for name in host:
        table.add_column(name, justify="right")
    columns = [{"ours": found} | found["peers"] for found in host.values()]
    for who in dict.fromkeys(who for column in columns for who in column):
        times = [column.get(who, {}).get("us") for column in columns]
        if any(times):
            table.add_row(who, *("" if us is None else f"{us:.1f}" for us in times))
    return table


def absences(result: dict[str, Any]) -> list[str]:
    """Each reason why a peer gave no time, once, with the rows it holds for."""
    rows: dict[str, list[str]] = {}
    for row in result["rows"]:
        for name, peer in row["peers"].items():
            if "us" not in peer:
                why = peer.get("absent") or peer["failed"]
                rows.setdefault(f"{name}: {why}", []).append(row["name"])
    return [
        f"{reason} ({', '.join(names) if len(names) < 4 else f'{len(names)} rows'})"
        for reason, names in rows.items()
    ]


def draw(result: dict[str, Any]) -> Figure:
    """The rows that compute under the roof of the machine that they were measured on."""
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for row in result["rows"]:
        if row["flops"] and "us" in row:
            group, _, name = row["name"].partition(" ")
            intensity = row["flops"] / (row["read"] + row["written"])
            points.setdefault(group, {})[name] = intensity, row["flops"] / row["us"] * PER_US
    ceilings = result["ceilings"]
    return viz.draw_roofline(
        points, ceilings["read"] * PER_US, ceilings["matmul"] * PER_US, LABELS,
        "What memory and arithmetic allow, and what the kernels reach",
    )  # fmt: skip
