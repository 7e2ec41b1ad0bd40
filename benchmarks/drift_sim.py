"""How often `strop loop watch` would start a loop for nothing, and how soon it sees a shift.

Days of synthetic sessions, of three kinds with their own tokens and acceptance lengths, arriving at a
rate that rises and falls with the hour. Stationary days count false alarms; shifted days change one
thing after 12 hours and count the requests until an alarm holds. The detectors run with the defaults
of strop.yaml, which bound the rate of false alarms by design; nothing here was used to set them.
Prints a table and, as its last line, one JSON object with `false_alarms` and `requests_to_alarm` (the
longest that any shift took to be seen; null if one was not).
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from strop.pipelines.drift import Observation
from strop.pipelines.settings import DriftSettings

DAYS, QUICK_DAYS = 20, 2
SESSIONS_PER_DAY = 8_640
DAY_S = 86_400
VOCABULARY = 4_000
DRAFTED = 3


@dataclass(frozen=True)
class Traffic:
    """What sessions are like at one time."""

    shares: tuple[float, float, float] = (0.6, 0.3, 0.1)
    """Of code, chat and extraction."""
    acceptance: float = 1.0
    """Factor on the share of drafted tokens that is accepted."""
    foreign_answers: float = 0.0
    """Share of answers in words that were not there before."""
    prompt_factor: float = 1.0


BEFORE = Traffic()
SHIFTS = {
    "drafts accepted 20 % less": replace(BEFORE, acceptance=0.8),
    "code from 60 to 30 %": replace(BEFORE, shares=(0.3, 0.6, 0.1)),
    "a third of the answers new": replace(BEFORE, foreign_answers=1 / 3),
    "prompts twice as long": replace(BEFORE, prompt_factor=2.0),
}


def sessions(seed: int, after: Traffic) -> Iterator[tuple[Observation, int, bool]]:
    """A day of sessions: what is seen of each, its number of requests, and whether the shift was before it."""
    rng = np.random.default_rng(seed)
    kinds = np.random.default_rng(1).dirichlet(np.full(VOCABULARY, 0.05), 4)
    cumulative = np.cumsum(kinds, axis=1)
    # The load follows the hour: arrivals of a Poisson process thinned to 1 + 0.8 sin.
    times = np.sort(rng.uniform(0, DAY_S, 2 * SESSIONS_PER_DAY))
    times = times[rng.random(len(times)) < 0.5 * (1 + 0.8 * np.sin(2 * np.pi * times / DAY_S))]
    for number, at in enumerate(times):
        shifted = after is not BEFORE and at > DAY_S / 2
        traffic = after if shifted else BEFORE
        kind = int(rng.choice(3, p=traffic.shares))
        spoken = 3 if rng.random() < traffic.foreign_answers else kind
        lengths = rng.lognormal((5.5, 4.5), (0.5, 0.6)) * (traffic.prompt_factor, 1.0)
        drawn = [
            np.searchsorted(cumulative[which], rng.random(int(length) + 1)).tolist()
            for which, length in zip((kind, spoken), lengths, strict=True)
        ]
        accepted = rng.beta(*((8, 4), (5, 5), (9, 3))[kind]) * traffic.acceptance
        observation = Observation(f"{seed}/{number}", *drawn, acceptance=1 + DRAFTED * float(accepted))
        yield observation, int(rng.geometric(0.45)), shifted


def day(seed: int, name: str | None) -> tuple[int, int, int | None]:
    """Sessions before any shift, alarms that came to hold in them, requests from the shift to one that holds."""
    settings = DriftSettings()
    drift = settings.drift()
    stationary, false_alarms, requests = 0, 0, 0
    for observation, turns, shifted in sessions(seed, SHIFTS[name] if name else BEFORE):
        drift.see(observation)
        requests += turns if shifted else 0
        stationary += not shifted
        if drift.holding and shifted:
            return stationary, false_alarms, requests
        if drift.holding:
            false_alarms += 1
            drift = settings.drift()
    return stationary, false_alarms, None


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--quick", action="store_true", help=f"{QUICK_DAYS} days of each instead of {DAYS}."
    )
    days = QUICK_DAYS if arguments.parse_args().quick else DAYS
    names = [None, *SHIFTS]
    jobs = [(1000 * place + seed, name) for place, name in enumerate(names) for seed in range(days)]
    with ProcessPoolExecutor(2) as pool:
        results = list(pool.map(day, *zip(*jobs, strict=True)))
    false_alarms = sum(false for _, false, _ in results)
    table = Table("shift", "days", "not seen", "requests, median", "requests, most")
    worst: dict[str, int | None] = {}
    for name in SHIFTS:
        took = [found for (_, _, found), (_, of) in zip(results, jobs, strict=True) if of == name]
        seen = [requests for requests in took if requests is not None]
        worst[name] = max(seen) if len(seen) == len(took) else None
        table.add_row(
            name,
            str(days),
            str(len(took) - len(seen)),
            f"{np.median(seen):.0f}" if seen else "–",
            str(worst[name]),
        )
    Console().print(table)
    watched = sum(stationary for stationary, _, _ in results)
    bound = watched / DriftSettings().sessions_to_false_alarm
    Console().print(
        f"{false_alarms} false alarms in {watched:,} stationary sessions; at most {bound:.2g} expected."
    )
    found = list(worst.values())
    result = {
        "days": days,
        "stationary_sessions": watched,
        "false_alarms": false_alarms,
        "requests_to_alarm": None if None in found else max(n for n in found if n is not None),
        "by_shift": worst,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
