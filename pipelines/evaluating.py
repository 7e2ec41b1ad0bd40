"""What `strop eval` needs around an evaluation: finding both Stacks, serving them, choosing the traffic."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from pathlib import Path

from strop.evals.endpoints import is_url, side_at
from strop.evals.observation import ARMS, Arm, EvalError, Side
from strop.pipelines.datasets import DatasetError, split_of
from strop.pipelines.registry import Registry
from strop.pipelines.settings import Settings
from strop.serving.cluster import FleetUnavailable, RemoteFleet, connect, leased
from strop.serving.journal import recover
from strop.serving.selection import Condition
from strop.serving.stack import Stack, Topology
from strop.serving.traces import PROBE_TENANT, Trace, TraceSet, TraceStore, split_by_session, to_table

MAX_TRACES = 2000
"""Newest held-out requests that an evaluation may draw from."""

Say = Callable[[str], None]


def find_stack(name: str, settings: Settings, home: Path) -> Stack:
    """The Stack in a manifest, the plain one of a model folder, or a registered one.

    Raises EvalError, StackError or RegistryError.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        serving = settings.serving
        return Stack.build(
            path,
            serving.served_model,
            serving.dtype,
            dict(serving.engine_args),
            Topology(replicas=serving.replicas, disaggregation=serving.disaggregation),
        )
    if path.is_file():
        return Stack.load(path)
    if path.suffix == ".json" or len(path.parts) > 1:
        raise EvalError(
            f"There is no {name}. Give a manifest, a model folder, a registered Stack or an address."
        )
    return Registry(home, settings.experiment).stack(name)


def heldout(wanted: str | None, settings: Settings, home: Path) -> list[Trace]:
    """Traffic to ask with, oldest first: the newest sessions recorded, or what `wanted` names.

    `wanted` is a dataset (its held-out side), a folder of Parquet files, or an SQLite condition on the
    recorded traces. Without any traffic the list is empty: some parts bring their own requests.
    Raises SelectionError for a condition that makes no sense, EvalError for one that nothing fulfils.
    """
    if wanted and Path(wanted).is_dir():
        found = list(TraceSet(Path(wanted)))
    elif wanted and (dataset := _dataset(wanted, home)) is not None:
        found = list(dataset)
    else:
        condition = Condition.parse(wanted or "status = 200")
        recover(home / "traces")
        recorded = list(
            TraceStore(home / "traces").scan(lambda t: t.tenant != PROBE_TENANT and t.has_content)
        )
        found = list(compress(recorded, condition.holds(to_table(recorded)))) if recorded else []
        if not wanted:
            found = split_by_session(found, settings.loop.heldout_share)[1]
    if wanted and not found:
        raise EvalError(f"No trace is in {wanted!r}. `strop traces stats` shows what is there.")
    kept = [trace for trace in found if trace.has_content]
    return sorted(kept, key=lambda trace: trace.started_at)[-MAX_TRACES:]


def find(
    names: tuple[str, str], manifests: Sequence[Path], settings: Settings, home: Path
) -> tuple[Side | Stack, Side | Stack]:
    """Both sides by name: what answers at an address already, or the Stack to be served.

    `manifests` are those of the addresses, in their order. Raises EvalError, StackError or RegistryError.
    """
    if len(manifests) > sum(map(is_url, names)):
        raise EvalError("There are more manifests than addresses: give --stack only for what has an address.")
    left = list(manifests)
    reference, candidate = (
        side_at(arm, name, left.pop(0) if left else None)
        if is_url(name)
        else find_stack(name, settings, home)
        for arm, name in zip(ARMS, names, strict=True)
    )
    return reference, candidate


@contextmanager
def served(
    found: tuple[Side | Stack, Side | Stack], settings: Settings, home: Path, say: Say
) -> Iterator[tuple[Side, Side]]:
    """Both sides while the block runs: Stacks in the running fleet, or in one that lives as long.

    Raises ProcessError if a Stack does not come up.
    """
    sides: list[Side] = []
    with ExitStack() as while_used:
        fleet: RemoteFleet | None = None
        for arm, wanted in zip(ARMS, found, strict=True):
            if isinstance(wanted, Side):
                sides.append(wanted)
                continue
            say(f"starting the {arm}, {wanted.fingerprint[:12]}")
            fleet = fleet or while_used.enter_context(_fleet(settings, home, wanted))
            if wanted.fingerprint not in fleet.stacks():
                while_used.callback(fleet.remove, wanted)
                while_used.enter_context(leased(fleet, wanted))
            sides.append(side_in(fleet, arm, wanted))
        reference, candidate = sides
        yield reference, candidate


@contextmanager
def _fleet(settings: Settings, home: Path, first: Stack) -> Iterator[RemoteFleet]:
    from strop.pipelines.deployment import temporary_fleet

    try:
        yield connect(home)
        return
    except FleetUnavailable:
        pass
    with temporary_fleet(settings, home, first) as fleet:
        yield fleet


def side_in(fleet: RemoteFleet, arm: Arm, stack: Stack) -> Side:
    """A Stack that the fleet serves, as a side of an evaluation."""
    pool = next(pool for pool in fleet.status().pools if pool.fingerprint == stack.fingerprint)
    return Side(arm, stack, pool.url, tuple(replica.url for replica in pool.replicas if replica.url))


def _dataset(name: str, home: Path) -> TraceSet | None:
    try:
        return split_of(home, name, "heldout")
    except DatasetError:
        return None
