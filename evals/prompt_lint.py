"""What in prompts keeps the prefix cache from being used, and what that costs.

A prefix cache gives a request the KV of the longest beginning that it shares with an earlier prompt,
in whole blocks. Prompts of one application share their system prompt and tools, unless something in
them changes: a time, a random id, a counter, a name, tools or keys in another order. Everything behind
it is computed again although it is the same text.

Two things are looked at. How much each prompt did share is exact, from token ids: prompts are sorted
as sequences, where the longest common beginning with any *earlier* prompt stands next to it once the
later ones are taken out, so that all are found in one pass over a linked list. What changed is read from
the text: prompts with the same fixed pieces are of one template (`prompt_pieces`), and the pieces that
differ from the template's previous prompt are the breakers. Nothing is compared with everything.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from strop.evals.prompt_pieces import Change, Kind, Where, changes, parts_of, templates
from strop.serving.traces import PROBE_TENANT, Trace, TraceError, TraceStore, read_table

COLUMNS = [
    "request_id", "started_at", "tenant", "session", "model", "format", "messages", "prompt_token_ids", "status",
    "queue_s", "ttft_s", "cached_tokens",
]  # fmt: skip
RATE_TOKENS = 64
"""Prompts with fewer tokens to compute say little about the rate of prefill."""

CONTENT: tuple[Kind, ...] = ("name", "text")
"""Kinds that may be what the prompt is about. They are told only where most of what follows is fixed text..."""
WORTH = 0.002
"""...and they cost this share of all prompt tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is read of a trace."""

    request_id: str
    started_at: datetime
    tenant: str
    session: str
    model: str
    messages: str
    format: str | None
    token_ids: np.ndarray
    """int32 [tokens]."""
    prefill_s: float | None = None
    """Time to first token less the time in the queue."""
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Breaker:
    """Something in prompts that keeps what follows from being shared."""

    kind: Kind
    where: Where
    tenant: str
    model: str
    excerpt: str
    """A few words with what changes in the middle."""
    examples: tuple[str, ...]
    """Up to three of its values."""
    position: int
    """Tokens before it, the median."""
    requests: int
    """Prompts that were computed again because of it."""
    wasted_tokens: int
    """Tokens that would have been shared if it were not there, in whole blocks and over all these prompts."""
    request_id: str
    """Of one of them, to look at."""
    fix: str


@dataclass(frozen=True, slots=True)
class Lint:
    """What was found in a number of prompts."""

    prompts: int
    prompt_tokens: int
    shared_tokens: int
    """Tokens that an earlier prompt of the same tenant and model begins with, in whole blocks."""
    wasted_tokens: int
    """Tokens that would have been shared besides; what several breakers keep from it counts once."""
    block_tokens: int
    prefill_tokens_per_s: float | None
    """Of these traces; None where they do not say."""
    breakers: tuple[Breaker, ...]
    """The costliest first."""

    def seconds(self, tokens: int) -> float | None:
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else None


def prompts_of(traces: Iterable[Trace]) -> Iterator[Prompt]:
    """Prompts of traces; those of strop's own and those without content or token ids are left out."""
    for t in traces:
        if t.tenant != PROBE_TENANT and t.messages and t.prompt_token_ids:
            ids = np.asarray(t.prompt_token_ids, dtype=np.int32)
            prefill_s = None if t.ttft_s is None else t.ttft_s - (t.queue_s or 0.0)
            yield Prompt(
                t.request_id, t.started_at, t.tenant, t.session, t.model, t.messages, t.format, ids, prefill_s,
                t.cached_tokens,
            )  # fmt: skip


def read_prompts(store: TraceStore, newest: int, tenant: str | None = None) -> list[Prompt]:
    """The newest prompts of a store (of a tenant), oldest first; files that cannot be read are passed over.

    Token ids are taken as arrays, which is what makes reading millions of them quick.
    """
    found: list[Prompt] = []
    for path in sorted(store.files(), key=lambda p: (p.parent.parent.name, p.name), reverse=True):
        found += (prompt for prompt in _prompts_in(path) if tenant in (None, prompt.tenant))
        if len(found) >= newest:
            break
    found.sort(key=lambda prompt: prompt.started_at)
    return found[-newest:]


def _prompts_in(path: Path) -> Iterator[Prompt]:
    try:
        table = read_table(path, COLUMNS).combine_chunks()
    except (OSError, pa.ArrowException, TraceError, KeyError):
        return
    if not table.num_rows:
        return
    column = table["prompt_token_ids"].combine_chunks()
    ids, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    rows = table.drop_columns(["prompt_token_ids"]).to_pylist()
    for number, row in enumerate(rows):
        start, end = int(offsets[number]), int(offsets[number + 1])
        if row["tenant"] != PROBE_TENANT and row["messages"] and end > start:
            ttft_s, queue_s = row["ttft_s"], row["queue_s"]
            yield Prompt(
                row["request_id"], row["started_at"], row["tenant"], row["session"], row["model"] or "",
                row["messages"], row["format"], ids[start:end],
                None if ttft_s is None else ttft_s - (queue_s or 0.0), row["cached_tokens"],
            )  # fmt: skip


def lint(prompts: Iterable[Prompt], block_tokens: int = 16) -> Lint:
    """Find what keeps prompts from sharing their beginnings; groups are of one tenant and model.

    Prompts count as computed in the order of their time, and what was computed as never forgotten.
    """
    if block_tokens < 1:
        raise ValueError("a block has at least one token")
    groups: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.tenant, prompt.model].append(prompt)
    costs: dict[tuple[str, ...], _Cost] = {}
    total = shared = wasted = count = 0
    for (tenant, model), group in groups.items():
        group.sort(key=lambda prompt: prompt.started_at)
        hits = shared_with_earlier([prompt.token_ids for prompt in group])
        count += len(group)
        total += sum(len(prompt.token_ids) for prompt in group)
        shared += int((hits // block_tokens * block_tokens).sum())
        wasted += _add_costs(group, hits, block_tokens, (tenant, model), costs)
    breakers = [
        cost.breaker(key[0], key[1])
        for key, cost in costs.items()
        if cost.kind not in CONTENT or cost.wasted >= WORTH * total
    ]
    return Lint(
        prompts=count,
        prompt_tokens=total,
        shared_tokens=shared,
        wasted_tokens=wasted,
        block_tokens=block_tokens,
        prefill_tokens_per_s=prefill_rate([prompt for group in groups.values() for prompt in group]),
        breakers=tuple(sorted(breakers, key=lambda breaker: -breaker.wasted_tokens)),
    )


def shared_with_earlier(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """For each sequence of token ids the longest beginning that any earlier one has, int64 [sequences].

    Sorted, the common beginning of two sequences is the least of those between neighbours on the way
    from one to the other. Taking sequences out from the last to the first leaves each beside the two
    earlier ones that are next to it, one of which has the longest.
    """
    number = len(sequences)
    keys = [np.asarray(ids).astype(">i4").tobytes() for ids in sequences]
    order = sorted(range(number), key=keys.__getitem__)
    del keys
    rank = np.empty(number, dtype=np.int64)
    rank[order] = np.arange(number)
    # Before the first and after the last, nothing is shared.
    common = [0] * (number + 1)
    for place in range(1, number):
        common[place] = common_beginning(sequences[order[place - 1]], sequences[order[place]])
    before, after = list(range(-1, number - 1)), list(range(1, number + 1))
    longest = np.zeros(number, dtype=np.int64)
    for one in range(number - 1, -1, -1):
        place = int(rank[one])
        left, right = before[place], after[place]
        # `common[p]` is what the sequence at p shares with the one that is left before it.
        to_left, to_right = common[place], common[right]
        longest[one] = max(to_left, to_right)
        if left >= 0:
            after[left] = right
        if right < number:
            before[right] = left
        common[right] = min(to_left, to_right)
    return longest


def common_beginning(a: np.ndarray, b: np.ndarray) -> int:
    """Number of equal token ids at the beginning of both."""
    shorter = min(len(a), len(b))
    different = a[:shorter] != b[:shorter]
    first = int(different.argmax()) if shorter else 0
    return first if shorter and different[first] else shorter


def prefill_rate(prompts: Sequence[Prompt]) -> float | None:
    """Prompt tokens computed a second, over all prompts that tell their time and what was cached."""
    computed = [
        (len(p.token_ids) - p.cached_tokens, p.prefill_s)
        for p in prompts
        if p.prefill_s is not None and p.prefill_s > 0 and p.cached_tokens is not None
    ]
    telling = [(tokens, seconds) for tokens, seconds in computed if tokens >= RATE_TOKENS]
    if not telling:
        return None
    # The median: a request that waited for others is no measure of how fast prompts are computed.
    return float(np.median([tokens / seconds for tokens, seconds in telling]))


@dataclass(slots=True)
class _Cost:
    """What one breaker costs, prompt after prompt."""

    change: Change
    positions: list[int] = field(default_factory=list)
    wasted: int = 0
    request_id: str = ""
    examples: dict[str, None] = field(default_factory=dict)
    kinds: Counter[Kind] = field(default_factory=Counter)

    @property
    def kind(self) -> Kind:
        """What its values look like for the most part: a random id may happen to look like a time."""
        return self.kinds.most_common(1)[0][0]

    def add(self, position: int, wasted: int, request_id: str, change: Change) -> None:
        self.positions.append(position)
        self.wasted += wasted
        self.request_id = request_id
        self.kinds[change.kind] += 1
        if len(self.examples) < 3:
            self.examples[change.value] = None

    def breaker(self, tenant: str, model: str) -> Breaker:
        return Breaker(
            kind=self.kind,
            where=self.change.where,
            tenant=tenant,
            model=model,
            excerpt=self.change.excerpt,
            examples=tuple(self.examples),
            position=int(np.median(self.positions)),
            requests=len(self.positions),
            wasted_tokens=self.wasted,
            request_id=self.request_id,
            fix=FIXES[self.kind],
        )


def _add_costs(
    group: Sequence[Prompt],
    hits: np.ndarray,
    block_tokens: int,
    whose: tuple[str, str],
    costs: dict[tuple[str, ...], _Cost],
) -> int:
    """Add what each breaker costs in the prompts of one group to `costs`; returns the tokens wasted in all.

    Text is turned into tokens at the prompt's own rate of tokens a byte; where prompts part is exact.
    """
    parts = [parts_of(prompt.messages, prompt.format) for prompt in group]
    latest: dict[int, list[int]] = {}
    turn_before: dict[str, int] = {}
    wasted = 0
    for number, template in enumerate(templates(parts)):
        here, prompt = parts[number], group[number]
        # Compared with: the template's last prompt of another text, and this session's turn before.
        known = latest.setdefault(template, [])
        mates = [one for one in known if parts[one].head != here.head][-1:]
        known[:] = [*mates, number]
        turn = turn_before.get(prompt.session)
        turn_before[prompt.session] = number
        if turn is not None and parts[turn].head == here.head:
            mates = [*mates, turn]
        worst = 0
        tokens_a_byte = len(prompt.token_ids) / max(1, here.size)
        for mate in mates:
            common = common_beginning(group[mate].token_ids, prompt.token_ids)
            found = changes(parts[mate], here, common / tokens_a_byte)
            for change in found:
                if (
                    change.kind in CONTENT
                    and 2 * change.shared_after < sum(map(len, here.head)) - change.start
                ):
                    continue
                # A change behind others is where it would stand if those were mended.
                position = common + round((change.start - found[0].start) * tokens_a_byte)
                could_share = position + int(change.shared_after * tokens_a_byte)
                did_share = max(position, int(hits[number]))
                lost = (could_share // block_tokens - did_share // block_tokens) * block_tokens
                if lost > 0:
                    key = (*whose, str(template), change.where, change.context)
                    costs.setdefault(key, _Cost(change)).add(position, lost, prompt.request_id, change)
                    worst = max(worst, lost)
        wasted += worst
    return wasted


FIXES: dict[Kind, str] = {
    "time": "Move the time behind everything fixed, into the newest user message, or round it to what is needed.",
    "id": "Leave the random id out of the prompt, or send it outside of it (a header, the request's metadata).",
    "counter": "Move the number behind everything fixed, into the newest user message, or leave it out.",
    "tool order": "Sort the tools by name before they are sent.",
    "key order": "Write the tools' JSON with sorted keys (json.dumps(..., sort_keys=True)) and the same spacing.",
    "order": "Write these parts in the same order every time; sort the keys where it is JSON.",
    "name": "Move what is known about the user behind everything fixed, to the end of the system prompt.",
    "text": "Move the text that changes behind the text that does not.",
}
"""What to do, by kind."""
