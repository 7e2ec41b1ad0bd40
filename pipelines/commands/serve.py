"""`strop serve`."""

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration file (default: ./strop.yaml).")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Serve the plain model, not the registry's champion.")
    ] = False,
) -> None:
    """Serve the champion: replicas, a cache-aware router, and a gateway with an OpenAI-compatible endpoint.

    Runs until Ctrl-C or SIGTERM, finishes the requests under way, and leaves no process behind.
    """
    import ray
    from ray.exceptions import RayError
    from rich.console import Console

    from strop.pipelines.deployment import plain_stack, serving_stack
    from strop.pipelines.registry import Registry
    from strop.pipelines.settings import load_settings
    from strop.serving.cluster import explain, start_fleet, start_ray
    from strop.serving.home import home
    from strop.serving.keys import take_keys
    from strop.serving.process import ProcessError, port_is_free

    settings = load_settings(config)
    serving = settings.serving
    if not port_is_free(serving.host, serving.port):
        raise ProcessError(
            f"Port {serving.port} on {serving.host} is in use. Stop what listens there, or set serving.port to another."
        )
    tenants = take_keys(serving.gateway.keys_file)
    console = Console(stderr=True)
    over = threading.Event()
    registry = Registry(home(), settings.experiment)
    stack = plain_stack(settings) if plain else serving_stack(settings, home(), registry)
    version = registry.ensure(stack)
    console.print(f"Stack {stack.fingerprint[:12]} (version {version}): {stack.served_model}, {stack.engine.dtype}, "
                  f"{stack.topology.replicas} replica(s), speculator: {stack.speculator.method if stack.speculator else 'none'}")  # fmt: skip
    with console.status("starting Ray"):
        start_ray(home(), serving.ray_address)
    # After Ray, which sets handlers of its own.
    for stopping in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stopping, lambda *_: over.set())
    try:
        fleet = start_fleet(serving, home(), tenants=tenants)
        try:
            with console.status("starting vLLM, which takes a minute or two on a CPU"):
                started = fleet.actor.add.remote(stack.to_json())
                while not over.is_set() and not ray.wait([started], timeout=0.5)[0]:
                    pass
                if not over.is_set():
                    ray.get(started)
                    fleet.route({stack.fingerprint: 1.0})
            if not over.is_set():
                registry.promote(version)
                console.print(
                    f"Ready: {fleet.status().gateway}/v1, model {serving.served_model!r}, "
                    f"{f'{len(set(tenants.values()))} tenant(s) by key' if tenants else 'no keys asked for'}. Ctrl-C stops it."
                )
            over.wait()
            console.print("Stopping: finishing the requests under way.")
        except RayError as error:
            raise ProcessError(explain(error)) from None
        finally:
            (home() / "run" / "fleet.json").unlink(missing_ok=True)
            fleet.shutdown()
    finally:
        ray.shutdown()
    # Ray's own threads can hold an interpreter for seconds after everything is stopped.
    os._exit(0)
