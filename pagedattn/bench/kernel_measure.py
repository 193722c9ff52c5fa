"""One run of `pagedattn bench kernels`: every row, ours and the peers',
each checked, then timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.nn.attention import SDPBackend

from pagedattn.bench.ceilings import measure_ceilings
from pagedattn.bench.installed_peers import INSTALLED
from pagedattn.bench.kernel_inputs import Pool, Trial, make_batches
from pagedattn.bench.kernel_rows import HOST, AttentionRow, Ceilings, SmallRow
from pagedattn.bench.kernel_trials import attention_trial, climb_trials, made_plan, small_trials
from pagedattn.bench.peers import Absent, flex_trial, sdpa_trial

MOST_ERROR = 0.01  # of the norm: bf16 has 8 bits

Clock = Callable[[Sequence[Callable[[], object]]], float]
Make = Callable[[], list[Trial]]
Row = AttentionRow | SmallRow


class Measurement:
    """Times what it is given, after a check, and says on the way how far it is."""

    def __init__(
        self, pool: Pool, clock: Clock, host_clock: Clock, say: Callable[[str], object], *,
        flex: bool,
    ):  # fmt: skip
        self.pool = pool
        self.clock = clock
        self.host_clock = host_clock
        self.say = say
        self.flex = flex
        self.dense: dict[object, dict[str, Any]] = {}  # of peers that do not see the blocks

    def trial_us(self, trial: Trial) -> float:
        """Microseconds of a call. Raises ValueError if what it computes is wrong."""
        return self._time([trial])["us"]

    def _time(self, trials: Sequence[Trial]) -> dict[str, float]:
        """The best of some ways to do the same."""
        times = []
        for trial in trials:
            with trial.context():
                error = trial.error(trial.calls[0]())
                if not error <= MOST_ERROR:
                    raise ValueError(f"the result is wrong: its relative error is {error:.2g}")
                us = round(self.clock(trial.calls), 3)
            times.append({"us": us, "error": float(f"{error:.2g}")})
        return min(times, key=lambda time: time["us"])

    def outcome(self, name: str, make: Make) -> dict[str, Any]:
        """Time and error, or why there is none: one that fails must not lose all others."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")  # torch says in warnings why a backend refuses
            try:
                found: dict[str, Any] = self._time(make())
            except Absent as reason:
                return {"absent": str(reason)}
            except Exception as error:
                reasons = [error, *(warning.message for warning in said)]
                words = dict.fromkeys(filter(None, map(_first_line, reasons)))
                found = {"failed": f"{type(error).__name__}: {'; '.join(words)[:400]}"}
        self.say(f"{name}: {found.get('failed') or str(found['us']) + ' us'}")
        return found

    def row(self, row: Row) -> dict[str, Any]:
        """Ours and every peer."""
        return self.attention(row) if isinstance(row, AttentionRow) else self.small(row)

    def host(self, row: Row) -> dict[str, Any]:
        """The same by the clock of the CPU: what a call takes where no graph launches it."""

        def say(line: str) -> None:
            self.say(f"on the CPU, {line}")

        return Measurement(self.pool, self.host_clock, self.host_clock, say, flex=False).row(row)

    def attention(self, row: AttentionRow) -> dict[str, Any]:
        """Ours and every peer at one row."""
        batches = make_batches(self.pool, row)
        found = self.outcome(row.name, lambda: [attention_trial(batches, made_plan)])
        cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
        dense: dict[str, Make] = {
            "SDPA cuDNN": lambda: [sdpa_trial(self.pool, row, cudnn)],
            "SDPA flash": lambda: [sdpa_trial(self.pool, row, flash)],
        }
        if self.flex:
            dense["FlexAttention"] = lambda: [flex_trial(self.pool, row)]
        peers = {name: self._dense(name, row, make) for name, make in dense.items()}
        for name, trials in INSTALLED.items():
            peers[name] = self.outcome(f"{row.name}, {name}", partial(trials, batches))
        return found | {"peers": peers}

    def _dense(self, name: str, row: AttentionRow, make: Make) -> dict[str, Any]:
        """Rows that differ in their blocks alone are one for a peer without blocks."""
        key = name, row.seq_lens, row.query_lens, row.num_kv_heads, row.head_dim, row.fp8
        if key not in self.dense:
            self.dense[key] = self.outcome(f"{row.name}, {name}", make)
        return self.dense[key]

    def small(self, row: SmallRow) -> dict[str, Any]:
        """One of the other kernels, and who else does the same."""
        batch = make_batches(self.pool, row.attention)[0] if row.attention else None
        ours, peers = small_trials(self.pool, row, batch)
        found = self.outcome(row.name, lambda: [ours])
        return found | {"peers": self._outcomes(row.name, peers)}

    def climb(self, row: AttentionRow) -> dict[str, Any]:
        """The steps to the shipped decode kernel at one row."""
        return self._outcomes(row.name, climb_trials(make_batches(self.pool, row)))

    def _outcomes(self, name: str, makes: Mapping[str, Callable[[], Trial]]) -> dict[str, Any]:
        def made(make: Callable[[], Trial]) -> list[Trial]:
            return [make()]

        return {
            who: self.outcome(f"{name}, {who}", partial(made, make)) for who, make in makes.items()
        }


def _first_line(error: object) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line.partition(" (Triggered internally")[0][:200]


def measure(
    measurement: Measurement,
    rows: Sequence[Row],
    climbs: Sequence[AttentionRow],
    ceilings: Ceilings | None = None,
) -> dict[str, Any]:
    """The ceilings, unless they are given, then every row, then the climb; and what calls of some
    rows take on the CPU."""
    if ceilings is None:
        ceilings = measure_ceilings(measurement.pool, measurement.trial_us)
        measurement.say(str(ceilings))
    return {
        "ceilings": ceilings._asdict(),
        "rows": [{"name": r.name} | judged(r, measurement.row(r), ceilings) for r in rows],
        "climb": {row.name: measurement.climb(row) for row in climbs},
        "host": {row.name: measurement.host(row) for row in rows if row.name in HOST},
    }


def judged(row: Row, times: dict[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    """A row's times beside its floor and the best peer."""
    floor, limit = row.work.floor(ceilings)
    found = row.work._asdict() | {"floor_us": round(floor, 3), "limit": limit} | times
    if "us" not in times:
        return found
    found["share"] = round(floor / times["us"], 4)
    peers = {name: peer["us"] for name, peer in times["peers"].items() if "us" in peer}
    if peers:
        best = min(peers, key=lambda name: peers[name])
        found |= {"best_peer": best, "ratio": round(times["us"] / peers[best], 4)}
    return found


def failures(result: Mapping[str, Any]) -> list[str]:
    """Our kernels that gave no time, with the reason. A peer may fail."""
    ours = {row["name"]: row for row in result["rows"]}
    for name, climb in result["climb"].items():
        ours |= {f"climb {name}, {step}": found for step, found in climb.items()}
    ours |= {f"{name}, on the CPU": found for name, found in result["host"].items()}
    return [f"{name}: {found['failed']}" for name, found in ours.items() if "failed" in found]
