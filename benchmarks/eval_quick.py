"""Does the quick suite tell what is worse from what is the same, and do its intervals keep their word?

Statistics, simulated (`--statistics-only` stops there): sessions of a few requests that resemble each
other, of every kind of measurement, summed up by the functions that sum up real ones. Coverage is
held against the nominal 90 %; a gate that the candidate is exactly at must pass in at most 5 %.

Then, on real servers: two Stacks that differ in nothing that matters must not fail, within six
minutes with their start; and three planted faults must fail: a wrong scale in one layer, another chat
template, and a sampler (a proxy before the server) that does not keep to the temperature.

Keys of the last line: minutes (both starts and the suite; None without servers), coverage_error
(the most by which an interval covers less than it says, over all kinds and sizes), false_pass_rate
(the largest of all kinds and sizes), planted_missed (of three, or of those that --case names); and besides: coverage and
false_passes by kind and size, coverage_excess (the most by which an interval covers more), verdicts
by case, failed_gates, seconds by part, simulation_error (two standard deviations of one simulated coverage).
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from strop.evals.aggregate import Aggregate, Measurement, Statistic
from strop.evals.evaluate import evaluate
from strop.evals.evaluation import Evaluation
from strop.evals.gates import Gate
from strop.evals.observation import Metric, Observation, Side
from strop.evals.suite import load
from strop.pipelines import demo_model
from strop.pipelines.deployment import plain_stack, temporary_fleet
from strop.pipelines.eval_report import write
from strop.pipelines.settings import Settings
from strop.serving.client import send
from strop.serving.cluster import RemoteFleet
from strop.serving.settings import ServingSettings
from strop.serving.stack import Stack
from strop.serving.traces import Choice, Trace

console = Console(stderr=True)
_HOP_BY_HOP = frozenset({"transfer-encoding", "content-length", "connection", "keep-alive"})
DATA = Path(__file__).parents[2] / "shared" / "data"
CONFIDENCE = 0.9
CASES = ("same", "scale", "template", "sampling")
SIZES = (12, 25, 50, 200, 500)

Draw = Callable[[np.random.Generator, int], list[Observation]]

# -- simulated sessions ------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of measurement: how its sessions are drawn, and what is true of them."""

    metric: Metric
    statistic: Statistic
    truth: float
    draw: Draw

    def sample(self, rng: np.random.Generator, sessions: int) -> Measurement:
        aggregate = Aggregate.of([self.metric], self.draw(rng, sessions))
        found = aggregate.measure(self.metric.name, statistic=self.statistic)
        assert found is not None
        return found


def _observations(
    metric: str, session: Any, candidate: list[tuple[float, ...]], reference: list[tuple[float, ...]] | None
) -> list[Observation]:
    rows = enumerate(zip(session, candidate, reference or [None] * len(candidate), strict=True))
    return [Observation(metric, str(i), str(s), (), ours, theirs) for i, (s, ours, theirs) in rows]


def _turns(rng: np.random.Generator, sessions: int) -> Any:
    return np.repeat(np.arange(sessions), rng.integers(1, 6, sessions))


def _share(ours: float, theirs: float) -> Draw:
    """Failures that gather in some sessions: a session's chance is Beta(1/2, 2), 0.2 on average."""

    def draw(rng: np.random.Generator, sessions: int) -> list[Observation]:
        session = _turns(rng, sessions)
        chance = rng.beta(0.5, 2, sessions)[session] / 0.2
        here, there = (
            [(float(x),) for x in rng.random(len(session)) < rate * chance] for rate in (ours, theirs)
        )
        return _observations("share", session, here, there)

    return draw


def _singles(rate: float) -> Draw:
    def draw(rng: np.random.Generator, sessions: int) -> list[Observation]:
        fails = [(float(x),) for x in rng.random(sessions) < rate]
        return _observations("single", range(sessions), fails, [(0.0,)] * sessions)

    return draw


def _agreement(rng: np.random.Generator, sessions: int) -> list[Observation]:
    """Tokens that agree, a session's share being Beta(19, 1)."""
    shares = rng.beta(19, 1, sessions)
    tokens = [tuple((rng.random(rng.integers(10, 60)) < share).astype(float)) for share in shares]
    return _observations("agreement", range(sessions), tokens, None)


def _distance(sigma: float) -> Draw:
    """Exponential per token, lognormal between sessions; 0.02 on average."""

    def draw(rng: np.random.Generator, sessions: int) -> list[Observation]:
        means = 0.02 * np.exp(rng.normal(-(sigma**2) / 2, sigma, sessions))
        return _observations(
            "distance", range(sessions), [tuple(rng.exponential(m, 30)) for m in means], None
        )

    return draw


def _times(noise: float) -> Draw:
    """Lognormal, alike within a session, 10 % slower with noise of the pair's own."""

    def draw(rng: np.random.Generator, sessions: int) -> list[Observation]:
        session = _turns(rng, sessions)
        base = rng.normal(0, 0.5, sessions)[session] + rng.normal(0, 0.3, len(session))
        ours, theirs = (np.exp(base + rng.normal(0, noise, len(session))) for _ in range(2))
        return _observations("times", session, [(1.1 * x,) for x in ours], [(x,) for x in theirs])

    return draw


def kinds() -> dict[str, Kind]:
    share = Metric("share", "", "lower", "difference", "share of failures")
    single = Metric("single", "", "lower", "difference", "share of failures, one request a session")
    agreement = Metric("agreement", "", "higher", "level", "share of tokens")
    distance = Metric("distance", "nats", "lower", "level", "distance")
    times = Metric("times", "s", "lower", "ratio", "time")
    return {
        "rare failures": Kind(share, "mean", 0.01, _share(0.02, 0.01)),
        "frequent failures": Kind(share, "mean", 0.1, _share(0.2, 0.1)),
        "single requests": Kind(single, "mean", 0.05, _singles(0.05)),
        "tokens that agree": Kind(agreement, "mean", 0.95, _agreement),
        "distance": Kind(distance, "mean", 0.02, _distance(0.5)),
        "heavy-tailed distance": Kind(distance, "mean", 0.02, _distance(1.0)),
        "distance, median": Kind(distance, "median", _median(0.5), _distance(0.5)),
        "ratio": Kind(times, "mean", 1.1, _times(0.05)),
        "noisy ratio": Kind(times, "mean", 1.1, _times(0.4)),
        "ratio, median": Kind(times, "median", 1.1, _times(0.1)),
    }


def _median(sigma: float) -> float:
    rng = np.random.default_rng(0)
    means = 0.02 * np.exp(rng.normal(-(sigma**2) / 2, sigma, 1_000_000))
    return float(np.median(rng.exponential(means)))


def statistics(runs: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Coverage and false passes of every kind of measurement and number of sessions."""
    coverage: dict[str, dict[int, float]] = {}
    passes: dict[str, dict[int, float]] = {}
    for name, kind in kinds().items():
        coverage[name], passes[name] = {}, {}
        side = "at_most" if kind.metric.better == "lower" else "at_least"
        gate = Gate.model_validate(
            {"metric": kind.metric.name, "statistic": kind.statistic, side: kind.truth}
        )
        for size in sizes:
            rng = np.random.default_rng([size, len(coverage)])
            covered = passed = 0
            for _ in range(runs):
                # Its ends are those by which a gate with 95 % confidence passes.
                low, high = kind.sample(rng, size).interval(CONFIDENCE)
                covered += low <= kind.truth <= high
                passed += gate.within(low, high)
            coverage[name][size], passes[name][size] = covered / runs, passed / runs
        console.print(f"{name}: coverage {coverage[name]}, passes at the bound {passes[name]}")
    covered = [share for by_size in coverage.values() for share in by_size.values()]
    return {
        "coverage_error": round(max(0.0, CONFIDENCE - min(covered)), 4),
        "coverage_excess": round(max(covered) - CONFIDENCE, 4),
        "false_pass_rate": max(share for by_size in passes.values() for share in by_size.values()),
        "coverage": coverage,
        "false_passes": passes,
        "simulation_error": round(2 * float(np.sqrt(CONFIDENCE * (1 - CONFIDENCE) / runs)), 4),
    }


# -- real servers ------------------------------------------------------------------------------

QUESTIONS = [
    "Why is the sky blue?", "Write a function that reverses a list in Python.", "Name three rivers in Europe.",
    "Explain photosynthesis to a child.", "Write a short letter to a landlord.", "What is 17 times 12?",
    "List the planets as a JSON array.", "Summarise the story of the tortoise and the hare.",
    "How do I boil an egg?", "Translate 'good morning' into French.", "What is a binary search tree?",
]  # fmt: skip


async def record(url: str, stack: Stack, sessions: int, max_tokens: int) -> list[Trace]:
    """Traffic to hold both Stacks against: questions as the reference answers them, half of them sampled."""
    questions = list(_questions())[:sessions]
    limit = asyncio.Semaphore(8)

    async def ask(client: httpx.AsyncClient, number: int, question: str) -> Trace:
        sampling = {"temperature": 0.0 if number % 2 else 0.7, "max_tokens": max_tokens, "seed": number}
        messages = [{"role": "user", "content": question}]
        body = {"model": stack.served_model, "messages": messages, **sampling, "return_token_ids": True}
        started = datetime.now(UTC)
        async with limit:
            outcome = await send(client, url, "chat", body, session=f"q{number}")
        choice = Choice(0, outcome.token_ids or [], outcome.text, outcome.finish_reason)
        return Trace(
            request_id=f"q{number}", started_at=started, tenant="bench", session=f"q{number}",
            stack=stack.fingerprint, endpoint="chat", stream=True, model=stack.served_model,
            sampling=json.dumps(sampling), format=None, messages=json.dumps(messages),
            prompt_token_ids=outcome.prompt_token_ids or [], choices=[choice], status=outcome.status,
            error=outcome.error, ttft_s=outcome.ttft_s, e2e_s=outcome.e2e_s,
        )  # fmt: skip

    async with httpx.AsyncClient(trust_env=False) as client:
        traces = await asyncio.gather(*(ask(client, n, q) for n, q in enumerate(questions)))
    return [trace for trace in traces if trace.error is None]


def _questions() -> Iterator[str]:
    path = DATA / "spec_bench_question.jsonl"
    if path.is_file():
        found = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]
        found = [question for question in found if len(question) < 600]
        yield from found[:: max(1, len(found) // 64)]
    yield from QUESTIONS


@contextmanager
def sampling_bug(url: str, temperature: float) -> Iterator[str]:
    """A proxy that answers every request at another temperature than was asked for."""
    from aiohttp import ClientSession, ClientTimeout, web

    async def forward(request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.method == "POST" and data:
            data = json.dumps({**json.loads(data), "temperature": temperature}).encode()
        async with (
            ClientSession(timeout=ClientTimeout(total=None), auto_decompress=False) as session,
            session.request(
                request.method, url + request.path_qs, data=data or None,
                headers={k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")},
            ) as upstream,
        ):  # fmt: skip
            kept = {k: v for k, v in upstream.headers.items() if k.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            # Suites end requests whose time is over.
            with suppress(ConnectionResetError):
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response

    loop = asyncio.new_event_loop()
    application = web.Application(client_max_size=64 << 20)
    application.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(application)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def wrong_scale(model: Path, target: Path, factor: float) -> Path:
    """A copy of the model with one weight tensor in the middle multiplied by `factor`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, target)
    file = target / "model.safetensors"
    weights = load_file(file)
    layers = [name for name in weights if name.endswith("mlp.down_proj.weight")]
    name = sorted(layers, key=lambda n: int(n.split(".layers.")[1].split(".")[0]))[len(layers) // 2]
    weights[name] = (weights[name].float() * factor).to(weights[name].dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return target


def other_template(model: Path, target: Path) -> Path:
    """A copy of the model whose chat template forgets the line break after the role."""
    shutil.copytree(model, target)
    file = target / "chat_template.jinja"
    changed = file.read_text().replace("message['role'] + '\n'", "message['role'] + ' '")
    if changed == file.read_text():
        raise SystemExit(f"{file} is another template than this knows how to change: give another --model.")
    file.write_text(changed)
    return target


def served(arguments: argparse.Namespace, home: Path) -> dict[str, Any]:
    """The same twice, then each planted fault, on servers of their own."""
    os.environ["STROP_HOME"] = str(home)
    model = arguments.model or demo_model.fetch(home / "models")
    settings = Settings(model=str(model), serving=ServingSettings(served_model="model"))
    reference = plain_stack(settings)
    plan = load("quick")
    found: dict[str, Evaluation] = {}
    began = time.monotonic()
    with temporary_fleet(settings, home, reference) as fleet:
        start_s = time.monotonic() - began
        here = _side(fleet, "reference", reference)
        traces = asyncio.run(record(here.url, reference, arguments.sessions, 48))

        def judge(name: str, there: Side) -> None:
            def report(done: float, text: str) -> None:
                console.print(f"{name} {done:.0%} {text}")

            found[name] = evaluate(here, there, traces, plan, home / "evals" / name.replace(" ", "-"), report)
            write(found[name], (arguments.report or home) / name.replace(" ", "-"))
            console.print(f"{name}: {found[name].summary}")

        def against(name: str, stack: Stack) -> float:
            began = time.monotonic()
            fleet.add(stack)
            judge(name, _side(fleet, "candidate", stack))
            took = time.monotonic() - began
            fleet.remove(stack)
            return took

        minutes: float | None = None
        if "same" in arguments.case:
            # Another Stack only in that it may take one request fewer at a time.
            args = {**reference.engine.args, "max-num-seqs": 15}
            engine = reference.engine.model_copy(update={"args": args})
            took_s = start_s + against("same", reference.model_copy(update={"engine": engine}))
            minutes = round(took_s / 60, 2)
        if "scale" in arguments.case:
            scaled = wrong_scale(Path(model), home / "scaled", arguments.scale)
            against("wrong scale", plain_stack(settings.model_copy(update={"model": str(scaled)})))
        if "template" in arguments.case:
            template = other_template(Path(model), home / "template")
            against("chat template", plain_stack(settings.model_copy(update={"model": str(template)})))
        if "sampling" in arguments.case:
            with sampling_bug(here.url, 1.0) as url:
                odd = reference.model_copy(update={"image": "a sampler that is off"})
                judge("sampling bug", Side("candidate", odd, url))
    planted = [each.verdict for name, each in found.items() if name != "same"]
    return {
        "minutes": minutes,
        "planted_missed": len(planted) - planted.count("failed"),
        "verdicts": {name: each.verdict for name, each in found.items()},
        "failed_gates": {
            name: sorted({f"{g.metric} of {g.slice}" for g in each.gates if g.answer == "failed"})
            for name, each in found.items()
        },
        "seconds": {name: {p.name: round(p.seconds) for p in each.parts} for name, each in found.items()},
    }


def _side(fleet: RemoteFleet, arm: Any, stack: Stack) -> Side:
    pool = next(pool for pool in fleet.status().pools if pool.fingerprint == stack.fingerprint)
    return Side(arm, stack, pool.url, tuple(replica.url for replica in pool.replicas))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="200 simulated runs of each kind, of fewer sizes, instead of 1000",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--statistics-only", action="store_true", help="start no servers")
    part.add_argument("--servers-only", action="store_true", help="simulate nothing")
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES, help="candidates to evaluate")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--sessions", type=int, default=48, help="sessions of traffic to draw from")
    parser.add_argument(
        "--scale",
        type=float,
        default=2.0,
        help="factor of the planted wrong scale; two is what a mix-up of the two FP8 formats makes",
    )
    parser.add_argument("--report", type=Path, help="folder to keep the reports in")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"minutes": None, "planted_missed": None}
    if not arguments.servers_only:
        result |= statistics(200 if arguments.quick else 1000, (12, 50, 200) if arguments.quick else SIZES)
    if not arguments.statistics_only:
        with tempfile.TemporaryDirectory(prefix="strop-") as folder:
            result |= served(arguments, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
