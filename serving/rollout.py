"""Replace one Stack by another in a running fleet, or take the newcomer back.

start -> check -> warm -> canary -> cut over -> drain. Until the cut-over the champion keeps
every replica it had, so taking the candidate back is a change of weights. No request is sent
to a candidate before it has answered known requests as the champion does.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from strop.serving.canary import Arm, TakenBack, counted, decide, shortfall
from strop.serving.cluster import LEASE_S, RemoteFleet, renewing
from strop.serving.process import ProcessError
from strop.serving.settings import CanarySettings
from strop.serving.stack import Stack
from strop.serving.traces import PROBE_TENANT, TraceStore

Check = Callable[[str, str], list[str]]
"""Given the champion's and the candidate's URL, the reasons why the candidate's answers are wrong."""


@dataclass(frozen=True, slots=True)
class Event:
    """A moment of a rollout; weights are shares of sessions."""

    at_s: float
    event: str
    champion_weight: float
    candidate_weight: float
    detail: str


@dataclass(frozen=True, slots=True)
class Rollout:
    promoted: bool
    reason: str
    """In plain words."""
    events: list[Event]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def roll_out(
    fleet: RemoteFleet,
    champion: Stack,
    candidate: Stack,
    *,
    store: TraceStore,
    check: Check,
    warm: list[dict[str, Any]],
    settings: CanarySettings,
    canary: bool = True,
    on_event: Callable[[Event], None] = lambda _: None,
    on_evidence: Callable[[float, str], None] = lambda *_: None,
) -> Rollout:
    """Roll `candidate` out over `champion`, which is serving.

    Returns what happened; the fleet then serves exactly one of the two. `check` compares answers,
    `warm` holds chat bodies whose prompts are put into the candidate's prefix cache. With `canary`
    false the candidate is cut over to as soon as it is warm (an operator's promotion or rollback).
    `on_evidence` is told once a second what share of the needed live requests the canary has seen.
    """
    started = time.monotonic()
    events: list[Event] = []
    share = 0.0

    def note(event: str, detail: str = "") -> None:
        events.append(Event(round(time.monotonic() - started, 1), event, 1 - share, share, detail))
        on_event(events[-1])

    def give(new_share: float) -> None:
        nonlocal share
        shares = {champion.fingerprint: 1 - new_share, candidate.fingerprint: new_share}
        fleet.route({f: s for f, s in shares.items() if s > 0})
        share = new_share

    try:
        note("start", "starting the candidate's replicas beside the champion's")
        url = _add(fleet, candidate)
        champion_url = fleet.add(champion)
        with renewing(fleet, candidate, LEASE_S):
            if wrong := check(champion_url, url):
                raise TakenBack(f"its answers are wrong: {wrong[0]}")
            note("check", "the candidate answers known requests as the champion does")
            note("warm", f"{_warm(url, candidate.served_model, warm)} prompts are in its prefix cache")
        if canary:
            since = datetime.now(UTC)
            give(settings.share)
            note("canary", f"{settings.share:.0%} of sessions go to the candidate")
            note("evidence", _observe(fleet, champion, candidate, store, since, settings, on_evidence))
        give(1.0)
        fleet.renew(candidate, None)
        note("cut over", "every new request goes to the candidate")
        fleet.remove(champion)
        note("drained", "the champion finished its last requests and was stopped")
        return Rollout(True, "the candidate serves all traffic", events)
    except (TakenBack, ProcessError) as error:
        reason = str(error)
        _take_back(fleet, champion, candidate)
        share = 0.0
        note("taken back", reason)
        return Rollout(False, reason, events)
    except BaseException:
        _take_back(fleet, champion, candidate)
        raise


def _add(fleet: RemoteFleet, candidate: Stack) -> str:
    try:
        return fleet.add(candidate, LEASE_S)
    except ProcessError as error:
        raise TakenBack(f"it did not start: {error}") from None


def _observe(
    fleet: RemoteFleet,
    champion: Stack,
    candidate: Stack,
    store: TraceStore,
    since: datetime,
    settings: CanarySettings,
    on_evidence: Callable[[float, str], None],
) -> str:
    deadline = time.monotonic() + settings.deadline_s
    says_the_same = champion.numerics == candidate.numerics
    theirs, ours = Arm(), Arm()
    seen: set[Path] = set()
    while time.monotonic() < deadline:
        fleet.renew(candidate, LEASE_S)
        pools = {p.fingerprint: p for p in fleet.status().pools}
        pool = pools[candidate.fingerprint]
        if any(r.restarts or not r.alive for r in [*pool.replicas, *pool.prefill]):
            raise TakenBack("one of its replicas crashed")
        before = theirs.requests + ours.requests
        theirs.add(store.fresh(since, champion.fingerprint, seen))
        ours.add(store.fresh(since, candidate.fingerprint, seen))
        is_news = theirs.requests + ours.requests > before
        if is_news and (evidence := decide(theirs, ours, settings, says_the_same)) is not None:
            return evidence
        seen_share = min(1.0, min(theirs.requests, ours.requests) / settings.min_requests)
        missing = shortfall(theirs, ours, settings, says_the_same) if seen_share == 1 else ""
        on_evidence(seen_share, f"in doubt: {missing}" if missing else counted(theirs, ours, settings))
        time.sleep(1)
    raise TakenBack(
        f"not enough evidence within {settings.deadline_s:.0f} s of canary: {shortfall(theirs, ours, settings, says_the_same)}"
    )


def _take_back(fleet: RemoteFleet, champion: Stack, candidate: Stack) -> None:
    pools = {p.fingerprint for p in fleet.status().pools}
    if champion.fingerprint in pools:
        fleet.route({champion.fingerprint: 1.0})
    if champion.fingerprint != candidate.fingerprint:
        fleet.remove(candidate)


def _warm(url: str, model: str, bodies: list[dict[str, Any]]) -> int:
    warmed = 0
    with httpx.Client(timeout=300) as client:
        for body in bodies:
            request = {"model": model, "messages": body["messages"], "max_tokens": 1, "temperature": 0}
            answer = client.post(
                f"{url}/v1/chat/completions", json=request, headers={"X-Strop-Tenant": PROBE_TENANT}
            )
            warmed += answer.status_code == 200
    return warmed
