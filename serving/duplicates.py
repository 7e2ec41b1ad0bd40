"""Requests that say almost what another said: templates, retries, health checks, benchmarks run twice.

Prompts are compared as sets of runs of `_SHINGLE` tokens by MinHash (Broder, "On the resemblance and
containment of documents", 1997) with locality-sensitive hashing. Turns of one session repeat each
other by nature and are not compared. What many sessions share, such as a system prompt, does not
count: two questions to the same assistant are not duplicates.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator

import numpy as np
from datasketch import MinHash, MinHashLSH

from strop.serving.traces import WITHHELD, Trace, TraceSet

_SHINGLE = 3
_PERMUTATIONS = 128
_COMMON_SHARE = 0.1
_COMMON_SESSIONS = 3
_BUCKETS = 1 << 22
_MULTIPLIERS = np.random.default_rng(5).integers(1 << 63, size=_SHINGLE, dtype=np.uint64) | np.uint64(1)


def near_duplicates(
    traces: Collection[Trace] | TraceSet, similarity: float = 0.8, window: int = 20_000
) -> set[str]:
    """Request ids of all but the first of each group of near duplicates, in the order of `traces`.

    `similarity` is the Jaccard similarity of the runs of tokens, estimated to within 0.04 (one standard
    deviation). `traces` is read twice. Each is compared with the last `window` that were not duplicates,
    about 7 kB each; beyond those and 16 MiB of counts nothing is held. Records without content are
    no one's duplicates. Raises ValueError if `similarity` is not between 0 and 1.
    """
    if not 0 < similarity <= 1:
        raise ValueError(f"a similarity of {similarity:g} is not between 0 and 1")
    sessions, counts = _sessions_by_shingle(traces)
    common = max(_COMMON_SESSIONS, _COMMON_SHARE * sessions)
    # Candidates are checked, so it matters more that none is missed.
    index = MinHashLSH(threshold=similarity, num_perm=_PERMUTATIONS, weights=(0.1, 0.9))
    known: OrderedDict[Hashable, tuple[tuple[str, str], MinHash]] = OrderedDict()
    duplicates: set[str] = set()
    for number, (trace, shingles) in enumerate(_shingled(traces)):
        own = shingles[counts[shingles % _BUCKETS] <= common]
        sketch = MinHash(_PERMUTATIONS, hashfunc=int)
        sketch.update_batch((own if len(own) else shingles).tolist())
        session = (trace.tenant, trace.session)
        others = (known[key] for key in index.query(sketch))
        if any(s != session and sketch.jaccard(other) >= similarity for s, other in others):
            duplicates.add(trace.request_id)
            continue
        index.insert(number, sketch)
        known[number] = (session, sketch)
        if len(known) > window:
            index.remove(known.popitem(last=False)[0])
    return duplicates


def _sessions_by_shingle(traces: Collection[Trace] | TraceSet) -> tuple[int, np.ndarray]:
    """How many sessions there are, and in about how many each shingle occurs, by its bucket.

    A session's turns that come together are counted once; collisions only make a shingle seem commoner.
    """
    counts = np.zeros(_BUCKETS, dtype=np.uint32)
    sessions = 0
    before: tuple[str, str] | None = None
    seen = np.empty(0, dtype=np.uint64)
    for trace, shingles in _shingled(traces):
        session = (trace.tenant, trace.session)
        if session != before:
            before, seen = session, np.empty(0, dtype=np.uint64)
            sessions += 1
        buckets = np.unique(shingles % _BUCKETS)
        counts[np.setdiff1d(buckets, seen)] += 1
        seen = np.union1d(seen, buckets)
    return sessions, counts


def _shingled(traces: Collection[Trace] | TraceSet) -> Iterator[tuple[Trace, np.ndarray]]:
    """Each trace that has tokens with the hashes (uint64, 32 bits, distinct) of its prompt's shingles."""
    for trace in traces:
        tokens_T = np.asarray(trace.prompt_token_ids, dtype=np.int64)
        if len(tokens_T) == 0 or np.all(tokens_T == WITHHELD):
            continue
        if len(tokens_T) < _SHINGLE:
            tokens_T = np.pad(tokens_T, (0, _SHINGLE - len(tokens_T)), constant_values=WITHHELD)
        windows_NS = np.lib.stride_tricks.sliding_window_view(
            tokens_T.astype(np.uint64) + np.uint64(2), _SHINGLE
        )
        mixed_N = (windows_NS * _MULTIPLIERS).sum(axis=1, dtype=np.uint64)
        yield trace, np.unique(mixed_N >> np.uint64(32))
